"""FO205 per-parameter-python-loop

What it does
Finds a Python loop over a model's parameters between the phases of a step. Such loops usually keep an
average of weights (EMA), update a target network, clip gradients or sum their norms by hand.

Why it costs
Each parameter costs one or more operators, a few microseconds each on the host and a launch on a GPU,
however small it is: a model of 300 tensors pays 300 times. torch can do the same for all tensors in a
handful of calls.

Evidence
The training thread's stack was sampled up to a thousand times a second, between the phases of the step: a
loop whose first line goes over `parameters()`, `named_parameters()`, `buffers()`, `state_dict()` or
`param_groups` holds at least 5 % of the step. The ceiling is measured: steps without the loop, plus what
the device needs at its best for the loop's arithmetic and bytes.

Fix
Do it for all parameters at once (`torch._foreach_*`, `torch.nn.utils.get_total_norm`):

```diff
-for average, parameter in zip(averages, parameters):
-    average.data = decay * average.data + (1 - decay) * parameter.data
+with torch.no_grad():
+    torch._foreach_lerp_(averages, parameters, 1 - decay)
-norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
+norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
```

A decay that is read back from the GPU, or computed from a tensor, makes the host wait: keep it either a
Python number or a tensor.

Fix safety
Reordered: the same sums, in another order where parameters are joined.
"""

from __future__ import annotations

import re
from dataclasses import replace

from flatout.doctor.finding import Finding
from flatout.doctor.lines import found_between_phases
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence, Place, StackPath

ARMS = ("knock-out",)
RULE = title_of(__doc__, arms=ARMS)
TUNE = ("foreach-average",)
EXPLAINS = ("FO310",)
LEAST_SHARE = 0.05
PARAMETERS = r"\.(named_)?(parameters|buffers)\(|\.state_dict\(|\bparam_groups\b"
LOOP = re.compile(rf"^\s*for\b.*\bin\b.*({PARAMETERS})")
MOST_HEADER_LINES = 4


def detect(evidence: Evidence) -> list[Finding]:
    return found_between_phases(
        RULE, evidence, _loop, what="a loop over the parameters takes", least=LEAST_SHARE
    )


def _loop(path: StackPath, evidence: Evidence) -> Place | None:
    """Return the first line of the loop over parameters that a path lies in."""
    loops = evidence.stacks.loops if evidence.stacks is not None else {}
    for place in reversed(path.places):
        for line in reversed(loops.get(str(place), ())):
            if LOOP.search(_header(evidence.sources.get(place.file, {}), line)):
                return replace(place, line=line)
    return None


def _header(source: dict[str, str], line: int) -> str:
    """Return a loop's header as one line, even if it spans several."""
    header = ""
    for number in range(line, line + MOST_HEADER_LINES):
        header += source.get(str(number), "").partition("#")[0].rstrip()
        if header.endswith(":"):
            break
    return header
