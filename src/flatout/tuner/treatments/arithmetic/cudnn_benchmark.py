"""Choose convolution algorithms by trying them, if shapes stay the same.

Once chosen for a shape, an algorithm stays chosen whatever the setting becomes, so a running job cannot be
switched.
"""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value
from flatout.tuner.treatments.arithmetic.channels_last import propose as propose_for_convolutions


def propose(case: Case) -> list[Value]:
    """Propose it on a GPU if convolutions take a share of the step."""
    return propose_for_convolutions(case) if case.evidence.job.device == "cuda" else []


def install(patches: Patches, _value: Value) -> None:
    import torch

    patches.replace(torch.backends.cudnn, "benchmark", True)


TREATMENT = Treatment(
    propose,
    install,
    "choose convolution algorithms by trying them once for each shape",
    safety="reordered",
    times_kernels=True,
)
