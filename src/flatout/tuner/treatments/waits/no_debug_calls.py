"""Make calls that only help to debug or save memory do nothing.

`torch.cuda.empty_cache()` in a loop returns memory that the next step allocates again;
`torch.cuda.synchronize()` makes the host wait; anomaly detection records a stack for every operation.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value

WORDS = ("empty_cache", "cuda.synchronize", "detect_anomaly")


def propose(case: Case) -> list[Value]:
    """Propose it if the script names one of them."""
    return [True] if any(word in case.source for word in WORDS) else []


def install(patches: Patches, value: Value) -> None:
    _Switch(patches, value).on()


class _Switch:
    """Replaces the functions from the start, because a script may import their names."""

    def __init__(self, patches: Patches, _value: Value) -> None:
        import torch

        self._is_on, self._had_anomalies = False, False
        autograd = torch.autograd
        patches.replace(torch.cuda, "empty_cache", self._unless_on(torch.cuda.empty_cache))
        patches.replace(torch.cuda, "synchronize", self._unless_on(torch.cuda.synchronize))
        real_init, real_enter = autograd.set_detect_anomaly.__init__, autograd.detect_anomaly.__enter__

        def init(switch: Any, mode: bool, check_nan: bool = True) -> None:
            real_init(switch, mode and not self._is_on, check_nan)

        def enter(context: Any) -> None:
            real_enter(context)
            if self._is_on:
                torch.set_anomaly_enabled(False)

        patches.replace(autograd.set_detect_anomaly, "__init__", init)
        patches.replace(autograd.detect_anomaly, "__enter__", enter)

    def _unless_on(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if self._is_on else real(*args, **kwargs)

        return call

    def on(self) -> None:
        import torch

        self._is_on, self._had_anomalies = True, torch.is_anomaly_enabled()
        torch.set_anomaly_enabled(False)

    def off(self) -> None:
        import torch

        self._is_on = False
        if self._had_anomalies:
            torch.set_anomaly_enabled(True)


TREATMENT = Treatment(
    propose, install, "ignore empty_cache, synchronize and anomaly detection", safety="exact", switch=_Switch
)
