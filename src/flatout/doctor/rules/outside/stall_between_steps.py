"""FO805 stall-between-steps

What it does
Finds other work in your code that recurs every few steps and takes a tenth of the job or more.

Why it costs
Figures, logs, uploads and clean-ups run between two steps while nothing trains. Each seems rare, and none
of them shows up in the step's own figures.

Evidence
Steps that take several times as long as usual are examined: stack samples of the training thread, about 25
per second over the whole run, name the outermost line that no typical step has on its stack. It neither
calls a model nor saves one. The share is of the job's time after set-up, spread over the steps in which it
was seen. The ceiling is the speed-up of the job if that time cost nothing.

Fix
Do this less often, or in another thread or process:

```diff
-draw_figure(losses)
+writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)     # once, before the loop
+writer.submit(draw_figure, losses.copy())
```

Fix safety
Lossy: only you know what the line is for, and doing it less often changes what it does.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

detect = outside_rule(__doc__, "other", what="stops training again and again")
