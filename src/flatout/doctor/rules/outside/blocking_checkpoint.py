"""FO802 blocking-checkpoint

What it does
Finds checkpoints that stop training for a tenth of the time or more.

Why it costs
`torch.save` copies every tensor to the host, serialises it and waits for the disk. A model with Adam's
state takes some 12 bytes per parameter: a billion parameters are 12 GB, which at 1 GB/s means twelve
seconds in which nothing trains.

Evidence
Steps that take several times as long as usual are examined: stack samples of the training thread, about 25
per second over the whole run, show the line that saves. The share is of the job's time after set-up, spread
over the steps in which it was seen, or over an epoch if it recurs every epoch. The ceiling is the speed-up
of the job if that time cost nothing.

Fix
Save less often and without frozen weights, or copy the state and write it from another thread:

```diff
-torch.save(model.state_dict(), path)
+state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
+threading.Thread(target=torch.save, args=(state, path)).start()
```

Save frozen weights once, not with every checkpoint.

Fix safety
Exact: the numbers stay the same. A crash while a file is being written loses that checkpoint, so keep the
previous one.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

detect = outside_rule(
    __doc__,
    "checkpoint",
    what="saves while nothing trains",
    transformers="TrainingArguments(save_steps=) a larger number, or save_only_model=True",
    lightning="ModelCheckpoint(every_n_train_steps=) a larger number, or save_weights_only=True",
)
