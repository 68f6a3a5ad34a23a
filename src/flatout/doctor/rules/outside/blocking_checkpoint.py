"""FO802 blocking-checkpoint

What it does
Finds checkpoints for which training stops a tenth of the time or more.

Why it costs
`torch.save` copies every tensor to the host, turns it into bytes and waits for the disk. A model with
Adam's state is some 12 bytes per parameter: a billion parameters are 12 GB, at 1 GB/s twelve seconds in
which nothing trains.

Evidence
Steps that take several times the usual are looked into: the training thread's stack, some 25 times a
second over the whole run, shows the line that saves. The share is of the job's time after set-up, spread
over the steps in which it was seen, or over an epoch where it comes with each. The ceiling is the job
with that time for nothing.

Fix
Save less often, or copy the state first and write it from another thread:

```python
from torch.distributed.checkpoint.state_dict_saver import async_save   # copies, then writes behind

state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
threading.Thread(target=torch.save, args=(state, path)).start()
```

Save frozen weights once, not with every checkpoint.

Fix safety
Exact: the numbers stay the same. A crash while a file is written loses that checkpoint, so keep the one
before.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

detect = outside_rule(
    __doc__,
    "checkpoint",
    what="saves while nothing trains",
    fix="save less often and without frozen weights, or copy the state and write it from another thread",
    safety="exact",
)
