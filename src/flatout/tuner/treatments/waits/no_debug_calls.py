"""Calls that only help to debug or to save memory, made to do nothing.

`torch.cuda.empty_cache()` in a loop gives memory back that the next step asks for again;
`torch.cuda.synchronize()` makes the host wait; anomaly detection records a stack for every operation.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

WORDS = ("empty_cache", "cuda.synchronize", "detect_anomaly")


def propose(case: Case) -> list[Value]:
    """Where the script names one of them."""
    return [True] if any(word in case.source for word in WORDS) else []


def install(patches: Patches, _value: Value) -> None:
    import torch

    def ignore(*_args: Any, **_kwargs: Any) -> None: ...

    patches.replace(torch.cuda, "empty_cache", ignore)
    patches.replace(torch.cuda, "synchronize", ignore)
    real_init = torch.autograd.set_detect_anomaly.__init__

    def init(switch: Any, mode: bool, check_nan: bool = True) -> None:
        real_init(switch, False, check_nan)

    patches.replace(torch.autograd.set_detect_anomaly, "__init__", init)
    real_detect = torch.autograd.detect_anomaly.__enter__

    def enter(context: Any) -> None:
        real_detect(context)
        torch.set_anomaly_enabled(False)

    patches.replace(torch.autograd.detect_anomaly, "__enter__", enter)


TREATMENT = Treatment(
    name="no-debug-calls",
    safety="exact",
    summary="ignore empty_cache, synchronize and anomaly detection",
    propose=propose,
    install=install,
)
