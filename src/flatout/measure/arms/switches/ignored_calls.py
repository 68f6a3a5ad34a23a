"""Steps in which calls that only help to debug or save memory do nothing.

`torch.cuda.empty_cache()` returns memory that the next step allocates again, `torch.cuda.synchronize()` makes
the host wait for the GPU, and anomaly detection records a stack for every operation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.evidence import Place, Site
from flatout.measure.patches import Patches
from flatout.measure.phases import has_compiled
from flatout.measure.user_code import UserCode

CALLS = {"empty_cache": "no-empty-cache", "synchronize": "no-synchronize"}
ANOMALIES, NO_ANOMALIES = "detect_anomaly", "no-anomaly-detection"
FREED_OF_ANOMALIES = 0.5  # of the step, about: its cost shows in no line of its own


class IgnoredCall(Arm):
    """A function of torch.cuda that does nothing if the user's own lines call it."""

    def __init__(self, user_code: UserCode, name: str, *, suspicion: float, place: Place) -> None:
        self.kind = self.label = CALLS[name]
        self.suspicion, self.place = suspicion, place
        self._user_code, self._name = user_code, name
        self._patches = Patches()
        self._num_ignored = 0

    def begin(self) -> None:
        import torch

        real = getattr(torch.cuda, self._name)
        self._num_ignored = 0

        def ignore(*args: Any, **kwargs: Any) -> Any:
            if not self._user_code.is_user(sys._getframe(1).f_code):
                return real(*args, **kwargs)
            self._num_ignored += 1
            return None

        self._patches.replace(torch.cuda, self._name, ignore)

    def end(self) -> None:
        self._patches.undo()
        if not self._num_ignored:
            self.refusal = f"the script calls {self._name} by a name of its own"

    def release(self) -> None:
        self._patches.undo()


class NoAnomalies(Arm):
    """Turns anomaly detection off although the script turns it on; queries still see the script's setting."""

    kind = label = NO_ANOMALIES

    def __init__(self, *, suspicion: float, place: Place | None) -> None:
        self.suspicion, self.place = suspicion, place
        self._patches = Patches()
        self._asked: tuple[bool, bool] = (False, True)

    def begin(self) -> None:
        import torch

        turn = torch.set_anomaly_enabled
        self._asked = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())

        def note(enabled: bool, check_nan: bool = True) -> None:
            self._asked = (enabled, check_nan)

        self._patches.replace(torch, "set_anomaly_enabled", note)
        self._patches.replace(torch, "is_anomaly_enabled", lambda: self._asked[0])
        self._patches.replace(torch, "is_anomaly_check_nan_enabled", lambda: self._asked[1])
        self._patches.on_undo(lambda: turn(*self._asked))
        turn(False)

    def end(self) -> None:
        self._patches.undo()

    release = end


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose an arm for each such call that was counted."""
    calls = [site for site in context.sites if site.kind == "call"]
    anomalies = _most(calls, ANOMALIES)
    if anomalies is not None and not has_compiled():
        yield NoAnomalies(suspicion=FREED_OF_ANOMALIES, place=anomalies.place)
    for name in CALLS:
        found = _most(calls, name)
        if found is not None and context.device == "cuda":
            spent_s = found.host_s or 0.0
            share = spent_s / context.attributed_step_s if context.attributed_step_s else 0.1
            yield IgnoredCall(context.user_code, name, suspicion=min(1.0, max(0.1, share)), place=found.place)


def _most(sites: Iterable[Site], op: str) -> Site | None:
    found = [site for site in sites if site.op == op and site.calls_per_step >= 1 and site.via is None]
    return max(found, key=lambda site: site.calls_per_step, default=None)
