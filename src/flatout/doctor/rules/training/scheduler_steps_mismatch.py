"""FO903 scheduler-steps-mismatch

What it does
Finds a learning-rate schedule that counts epochs but is stepped in every batch. `CosineAnnealingLR` and
`PolynomialLR` end after `T_max` or `total_iters` steps. The reported line is the one that creates the
schedule.

Why it costs
The learning rate reaches its minimum before the first epoch has ended. A cosine then rises and falls again
and again; a polynomial stays at zero, and the model learns nothing from then on.

Evidence
The schedule was stepped about as often as the optimizer, and ends after less than half an epoch of the
loader. Schedules that restart by design, and warm-up schedules, are left alone. So is a schedule that
counts batches but is stepped once per epoch, because a diagnosis does not know how many epochs will follow.

Fix
Set the length in the unit that is stepped:

```diff
-schedule = CosineAnnealingLR(optimizer, T_max=num_epochs)                 # stepped in every batch
+schedule = CosineAnnealingLR(optimizer, T_max=num_epochs * len(loader))
```

or call `schedule.step()` once per epoch.

Fix safety
Lossy: the learning rate becomes what was intended.
"""

from __future__ import annotations

from flatout.doctor.ceilings import batches_per_step
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence, RateSchedule

RULE = title_of(__doc__)
ARMS = ()
FEWEST_STEPS = 10  # of the schedule
AS_OFTEN = 0.8  # as the optimizer
OF_AN_EPOCH = 0.5


def detect(evidence: Evidence) -> list[Finding]:
    lengths = [loader.num_batches or 0 for loader in evidence.loaders if loader.trains]
    if evidence.training is None or not all(lengths or [0]):
        return []
    epoch = min(lengths) / batches_per_step(evidence)
    return [
        _finding(schedule, epoch)
        for schedule in evidence.training.schedules
        if schedule.num_steps >= FEWEST_STEPS
        and schedule.num_steps >= AS_OFTEN * schedule.num_optimizer_steps
        and schedule.horizon < OF_AN_EPOCH * epoch
    ]


def _finding(schedule: RateSchedule, epoch: float) -> Finding:
    return RULE.finding(
        schedule.place,
        f"{schedule.name}({schedule.argument}={schedule.horizon}) is stepped in every batch, and an epoch "
        f"takes {epoch:.0f} steps",
        figures=(f"stepped {schedule.num_steps} times in {schedule.num_optimizer_steps} optimizer steps",),
        fix=f"count batches in {schedule.argument}, or step the schedule once per epoch",
    )
