"""FO109 thread-oversubscription

What it does
Finds CPU operators that are divided among more threads than the job may use cores. torch takes as many
threads as the machine has cores, even in a container that may use two of them, and in each of several
processes.

Why it costs
An operator finishes when its last thread does. Threads without a core wait for one, while threads that are
done spin and keep the cores busy. Users report small operators that take ten times as long.

Evidence
There are more threads than cores, and steps with fewer threads are faster with the whole 95 % interval
above 1.05×. The same steps give the ceiling.

Fix
Set the number before torch is imported, or in the script:

```diff
-torch.set_num_threads(16)
+torch.set_num_threads(2)        # or OMP_NUM_THREADS=2 in the environment
```

`flatout tune` tries it as the treatment `threads`. Loader workers use one thread each by default; libraries
with their own threads (OpenCV, BLAS) need their own setting there.

Fix safety
Reordered: sums are divided differently among threads, so results differ by rounding.
"""

from __future__ import annotations

from flatout.doctor.ceilings import beside
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

ARMS = ("threads",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("threads",)


def detect(evidence: Evidence) -> list[Finding]:
    threads, cores = evidence.threads, evidence.host.cores
    fewer = evidence.counterfactual(ARMS[0])
    if threads is None or not cores or threads.num <= cores or fewer is None:
        return []
    if not isinstance(fewer.value, float):
        return []
    message = f"operators use {threads.num} threads on {cores:g} cores"
    figure = f"with {fewer.value:g} the step takes {beside(fewer)}"
    share = 1 - 1 / fewer.speedup
    fix = f"call torch.set_num_threads({fewer.value:g}), or set OMP_NUM_THREADS={fewer.value:g}"
    return RULE.proven(evidence, threads.place, message, figures=(figure,), share=share, fix=fix)
