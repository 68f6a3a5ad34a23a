"""FO803 epoch-start-stall

What it does
Finds epochs whose start takes a tenth of the job or more, before the first batch arrives.

Why it costs
`iter(loader)` draws the order of all samples, and the first batch is made while nothing trains. A sampler
that works through a long Python list, or a dataset that reopens its files, does so in every epoch. Workers
that are started again are a separate cause: respawned-workers.

Evidence
The first step of an epoch takes longer than the others, and stack samples of the training thread find it in
the loader. The share is of the job's time after set-up, spread over an epoch. The ceiling is the speed-up
of the job if that time cost nothing.

Fix
Prepare the order of samples and open files once, or combine several epochs into one:

```diff
-random.shuffle(samples)
-loader = DataLoader(samples)
+loader = DataLoader(samples, sampler=RandomSampler(samples, num_samples=10 * len(samples)))
```

Fix safety
Lossy: the order of the samples changes and, with a longer epoch, so does what counts as one.
"""

from __future__ import annotations

from flatout.doctor.finding import Finding
from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule
from flatout.measure.evidence import Evidence

_detect = outside_rule(__doc__, "epoch-start", what="prepares an epoch before its first batch")


def detect(evidence: Evidence) -> list[Finding]:
    trained_on = [loader for loader in evidence.loaders if loader.trains]
    if trained_on and all(loader.num_workers and not loader.persistent_workers for loader in trained_on):
        return []  # respawned-workers reports the same time
    return _detect(evidence)
