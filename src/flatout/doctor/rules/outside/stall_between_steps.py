"""FO805 stall-between-steps

What it does
Finds other work of your own that comes every so many steps and takes a tenth of the job or more.

Why it costs
Figures, logs, uploads and clean-ups run between two steps while nothing trains. Each looks rare, and
none is in the step's own figures.

Evidence
Steps that take several times the usual are looked into: the training thread's stack, some 25 times a
second over the whole run, names the outermost line that no typical step has on its stack. It neither
calls a model nor saves one. The share is of the job's time after set-up, spread over the steps in which
it was seen. The ceiling is the job with that time for nothing.

Fix
Do it less often, or hand it to another thread:

```python
writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
writer.submit(draw_figure, losses.copy())
```

Fix safety
Lossy: what the line does is yours, and doing it less often changes what it does.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

detect = outside_rule(
    __doc__,
    "other",
    what="stops the training every so many steps",
    fix="do this less often, or in another thread or process",
    safety="lossy",
)
