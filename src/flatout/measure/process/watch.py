"""One watch over what the process does apart from its steps."""

from __future__ import annotations

from typing import Any

from flatout.measure.clock import Clock
from flatout.measure.patches import Patches
from flatout.measure.process.compilation import CompilationWatch
from flatout.measure.process.garbage import GarbageWatch
from flatout.measure.process.threads import ThreadsWatch
from flatout.measure.process.training import TrainingWatch
from flatout.measure.user_code import UserCode


class ProcessWatch:
    """Notes what belongs to no line of a step."""

    def __init__(self, clock: Clock, user_code: UserCode) -> None:
        self.compilation = CompilationWatch(user_code)
        self.garbage = GarbageWatch(user_code)
        self.threads = ThreadsWatch(user_code)
        self.training = TrainingWatch(clock, user_code)

    def install(self, patches: Patches) -> None:
        self.garbage.install(patches)
        self.threads.install(patches)
        self.training.install(patches)

    def step_end(self, arm: str) -> None:
        compiled = self.compilation.step_end(arm)
        self.garbage.step_end(arm, compiled=compiled)
        self.training.step_end(arm)

    def evidence(self, *, real_s: float) -> dict[str, Any]:
        """Return fields of Evidence; `real_s` is the total of all real steps."""
        return {
            "compilation": self.compilation.evidence(steps_s=real_s),
            "garbage": self.garbage.evidence(steps_s=real_s),
            "threads": self.threads.evidence(),
            "training": self.training.evidence(),
        }
