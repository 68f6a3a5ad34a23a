"""FO204 logging-every-step

What it does
Finds lines that print, log or draw a progress bar in every step, if that takes time. The reported line is
the innermost one in your code: a `print`, or a call of a logger, of `tqdm` or of a tracker.

Why it costs
A terminal, a log file and a tracker each take their turn before the next step begins: formatting numbers,
drawing a bar, or waiting for a pipe can take longer than a small step. In a public report, a bar drawn for
every batch made a job take 5.2 minutes instead of 1.3.

Evidence
The training thread's stack was sampled up to a thousand times a second, between the phases of the step: a
line that prints, or calls a package that logs, holds at least 5 % of the step. The ceiling is measured:
steps without that line. Waiting for numbers from a GPU is reported as [FO202](#fo202).

Fix
Log only every few dozen steps:

```diff
-for step, batch in enumerate(tqdm(loader)):
+for step, batch in enumerate(tqdm(loader, mininterval=1.0)):
     loss = train_step(batch)
-    print(f"step {step} loss {loss.item():.3f}")
+    if step % 50 == 0:
+        print(f"step {step} loss {loss.item():.3f}")
```

`flatout tune` tries progress bars that redraw less often, as the treatment `progress-bars`.

Fix safety
Exact: training does not change; fewer lines are written.
"""

from __future__ import annotations

import re

from flatout.doctor.finding import Finding
from flatout.doctor.lines import found_between_phases
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence, Place, StackPath

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
LEAST_SHARE = 0.05
LOGGERS = frozenset({
    "absl", "aim", "clearml", "comet_ml", "csv", "logging", "loguru", "mlflow", "neptune", "pprint",
    "progressbar", "rich", "structlog", "swanlab", "tensorboard", "tensorboardX", "tqdm", "wandb",
})  # fmt: skip
TENSORBOARD = "torch/utils/tensorboard"
PRINTS = re.compile(r"(?<![\w.])print\(|\bsys\.(stdout|stderr)\.(write|flush)\(")


def detect(evidence: Evidence) -> list[Finding]:
    return found_between_phases(
        RULE, evidence, _logging_line, what="logging here in every step takes", least=LEAST_SHARE
    )


def _logging_line(path: StackPath, evidence: Evidence) -> Place | None:
    """Return the user's innermost line if it prints or calls a package that logs."""
    place = path.places[-1]
    package = (path.library or "").partition("/")[0]
    if package in LOGGERS or (path.library or "").startswith(TENSORBOARD):
        return place
    text = evidence.sources.get(place.file, {}).get(str(place.line), "")
    return place if path.library in (None, "torch") and PRINTS.search(text) else None
