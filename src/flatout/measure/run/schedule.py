"""Which steps serve which instrument: the plan of a diagnosis.

Warm-up is detected, not assumed: the first steps allocate, compile and fill caches.  Then each
instrument gets its own few steps, and last come the rounds of the counterfactuals, in which blocks of
real, cached-batch and half-batch steps follow each other.  Two runs one after the other can differ by
40 % on a shared machine; blocks a second apart do not.  The first step of every block is a transition
(queues, caches and allocator change over) and is never timed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from flatout.measure.evidence import Arm

LONG_STEP_S = 2.0
SHORT_STEP_S = 0.2
ROUND_TARGET_S = 0.15
MOST_STEPS_PER_BLOCK = 40
STACKS_S, MOST_STACK_STEPS = 1.0, 100  # a hundred to a thousand looks
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_TARGET_S = 3, 8, 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock:
    """Consecutive steps of one arm; the first one is the transition into it."""

    arm: Arm
    num_steps: int


class WarmUp:
    """Decides, step by step, whether the job has reached its steady pace."""

    FEWEST, MOST, MOST_S = 4, 20, 20.0

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.reason = ""

    def add(self, step_s: float) -> bool:
        """True once the steps stopped getting faster; `reason` then says what decided it."""
        self.steps_s.append(step_s)
        num, total_s = len(self.steps_s), sum(self.steps_s)
        if step_s >= LONG_STEP_S and num >= 2 and step_s > 0.7 * self.steps_s[-2]:
            self.reason = f"{num} long steps, the last two within 30 %"
            return True
        if num >= self.FEWEST:
            recent = statistics.median(self.steps_s[-2:])
            before = statistics.median(self.steps_s[-4:-2])
            if recent > 0.8 * before:
                self.reason = f"after {num} steps two in a row were not 20 % faster than the two before"
                return True
        if num >= self.MOST or (num >= 2 and total_s > self.MOST_S):
            self.reason = f"not steady after {num} steps, {total_s:.0f} s; measured all the same"
            return True
        return False

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s[-2:])


def plan_blocks(step_s: float, *, seconds: float, cached: bool, half: bool) -> list[StepBlock]:
    """Blocks for a job whose step takes `step_s`, aiming at `seconds` in all.

    At least the few steps each instrument needs; at most about 60 steps' time plus a few seconds.
    """
    long = step_s >= LONG_STEP_S
    num_kept, num_rounds = _kept_per_block(step_s), FEWEST_ROUNDS
    arms: list[Arm] = ["real"]
    if cached:
        arms.append("cached")
    if half:
        arms.append("half")
    instruments = [
        StepBlock(arm="real", num_steps=1 + (1 if long else 3)),
        StepBlock(arm="count", num_steps=1 if long else 2),
        StepBlock(arm="stacks", num_steps=1 if long else min(MOST_STACK_STEPS, math.ceil(STACKS_S / step_s))),
        StepBlock(arm="kernels", num_steps=1 if long else 2),
        StepBlock(arm="memory", num_steps=4),
        # never next to the kernels' pass: a profiler session that begins in the very hook in which
        # another one ended can crash in torch's profiler
        StepBlock(arm="attribution", num_steps=1),
    ]
    spent_s = step_s * sum(block.num_steps for block in instruments)
    round_s = step_s * len(arms) * (1 + num_kept)
    while num_rounds < MOST_ROUNDS and round_s * (num_rounds + 1) < min(seconds - spent_s, ROUNDS_TARGET_S):
        num_rounds += 1
    rounds = [StepBlock(arm=arm, num_steps=1 + num_kept) for _ in range(num_rounds) for arm in arms]
    return instruments + rounds


def _kept_per_block(step_s: float) -> int:
    if step_s >= LONG_STEP_S:
        return 1
    if step_s >= SHORT_STEP_S:
        return 2
    return min(MOST_STEPS_PER_BLOCK, max(4, round(ROUND_TARGET_S / step_s)))
