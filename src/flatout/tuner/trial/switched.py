"""Turn treatments on and off in blocks of one run, several beside each other.

The schedule is that of a diagnosis: each block of an arm stands between blocks of unchanged steps, arms
without a gain end early, and the ratio with its interval comes from blocks a second apart.  One arm changes
nothing, to measure the noise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.measure.arms.arm import REAL, Arm, Same
from flatout.measure.evidence import Counterfactual, Step
from flatout.measure.patches import Patches
from flatout.measure.run.step_blocks.schedule import Rounds
from flatout.measure.statistics import compare, outliers
from flatout.tuner.treatment import Dose, Switch, treatment_of

LEAST_GAIN = 1.03
NO_GAIN = 1.01  # a treatment that shows less after a few rounds gets no more
FEW_ROUNDS, FEWEST_ROUNDS, NOISE_ROUNDS, MOST_ROUNDS = 3, 5, 6, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """What the blocks of one arm showed against the blocks beside them."""

    label: str
    ratio: float
    low: float  # 95 % interval
    high: float
    num_blocks: int


class _SwitchedArm(Arm):
    """A treatment that is on during its blocks."""

    kind = "treatment"

    def __init__(self, dose: Dose, switch: Switch) -> None:
        self.label, self._switch = str(dose), switch

    def begin(self) -> None:
        self._switch.on()

    def end(self) -> None:
        self._switch.off()


class Blocks:
    """Decides, block by block, which arm runs, and times its steps."""

    def __init__(self, doses: Sequence[Dose], patches: Patches, *, seconds: float) -> None:
        """Make the switches, off; the script starts next."""
        self._seconds = seconds
        self._arms: list[Arm] = [Same()]
        for dose in doses:
            make = treatment_of(dose).switch
            assert make is not None, dose
            self._arms.append(_SwitchedArm(dose, make(patches, dose.value)))
        self._on: Arm | None = None
        self._label, self._num_blocks, self._left = REAL, 0, 0
        self._ends: list[Any] = []  # of the steps of this block
        self._steps: list[Step] = []

    def begin(self, torch: Any, *, step_s: float) -> bool:
        """Begin the first block, between two steps; return False if there is no time for one."""
        self._torch, self._began_s = torch, time.perf_counter()
        self._rounds = Rounds(self._arms, step_s=step_s, seconds=self._seconds, is_settled=is_settled)
        return self._next_block()

    def step_end(self) -> bool:
        """Note the end of a step; return False if every arm is settled or the time is up."""
        self._ends.append(_now(self._torch))
        self._left -= 1
        if self._left:
            return True
        self._note_block()
        if self._on is not None:
            self._on.end()
        return self._next_block()

    def _next_block(self) -> bool:
        left_s = self._seconds - (time.perf_counter() - self._began_s)
        block = self._rounds.next(seconds_left=left_s, measure=self._measured)
        self._ends, self._on = [], None
        if block is None:
            return False
        self._label, self._left, self._num_blocks = block.arm, block.num_steps, self._num_blocks + 1
        self._on = self._rounds.arms.get(block.arm)
        if self._on is not None:
            self._on.begin()
        return True

    def _note_block(self) -> None:
        """Time all steps but the first, in which caches and queues change over."""
        if self._torch.cuda.is_initialized():
            self._torch.cuda.current_stream().synchronize()
        for one, other in itertools.pairwise(self._ends):
            self._steps.append(
                Step(
                    index=len(self._steps),
                    arm=self._label,
                    block=self._num_blocks,
                    step_s=one.elapsed_time(other) / 1e3 if hasattr(one, "elapsed_time") else other - one,
                    phases_s={},
                )
            )

    def _kept_steps(self) -> list[Step]:
        odd = outliers(self._steps)
        return [step for step in self._steps if step.index not in odd]

    def _measured(self, arm: Arm) -> Counterfactual | None:
        return compare(self._kept_steps(), label=arm.label, baseline=arm.baseline)

    def results(self) -> tuple[ArmResult, ...]:
        """Return what each arm showed, without those that never ran."""
        found = [(arm.label, self._measured(arm)) for arm in self._arms]
        return tuple(
            ArmResult(
                label=label,
                ratio=gained.speedup,
                low=gained.speedup_low,
                high=gained.speedup_high,
                num_blocks=gained.num_blocks,
            )
            for label, gained in found
            if gained is not None
        )


def is_settled(arm: Arm, num_blocks: int, gained: Counterfactual | None) -> bool:
    """Return whether more blocks would not change the answer; noise gets as many as it needs."""
    if num_blocks < FEW_ROUNDS or gained is None:
        return num_blocks >= MOST_ROUNDS
    if arm.label == Same.label:
        return num_blocks >= NOISE_ROUNDS
    if gained.speedup_high < LEAST_GAIN or gained.speedup < NO_GAIN:
        return True
    is_clear = gained.speedup_low > LEAST_GAIN and num_blocks >= FEWEST_ROUNDS
    return is_clear or num_blocks >= MOST_ROUNDS


def _now(torch: Any) -> Any:
    """Mark the end of a step: an event of the stream on a GPU, else the clock."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
