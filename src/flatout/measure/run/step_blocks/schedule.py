"""The plan of a diagnosis: which steps serve which instrument and which arm.

Warm-up is detected, not assumed: the first steps allocate, compile and fill caches.  Then each instrument
gets its own few steps, and last come the arms, in blocks beside blocks of their baseline.  Two runs one after
the other can differ by 40 % on a shared machine; blocks a second apart do not.  The first step of every block
is a transition (queues, caches and allocator change over) and is never timed; against a step of several
seconds that is nothing, so a baseline block is then one timed step.

If steps are long or time is short, the instruments would leave no time for arms.  Then only the passes that
choose arms come first, and the other passes use what the arms leave.

Every arm gets one block, the most suspicious first; arms that show a gain get more until their interval is
narrow.  Time decides how many; arms without time are named.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flatout.measure.arms.arm import REAL, Arm
from flatout.measure.evidence import ArmNotRun, Counterfactual

LONG_STEP_S = 2.0
SHORT_STEP_S = 0.2
ROUND_TARGET_S = 0.15
MOST_STEPS_PER_BLOCK = 40
LONGER = 6  # times as many steps at most, in the block of a fast arm
STACKS_S, MOST_STACK_STEPS = 1.0, 100  # a hundred to a thousand samples
MOST_LOOKING = 0.1  # of the time, for sampling
ENOUGH_REAL_S, ENOUGH_REAL_STEPS = 3.0, 200
ENOUGH_LOOKS_S, MOST_REAL_STEPS = 2.0, 3000  # of short steps: samples that find what comes once in many
ATTRIBUTION_S, MOST_ATTRIBUTED_STEPS = 0.4, 8  # the instrument slows them tenfold
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_TARGET_S = 3, 6, 6.0
# roughly: how much a pass slows a step, and its fixed cost: a profiler starts, all objects are walked
SLOWS = {"stacks": 1.0, "count": 1.5, "kernels": 2.0, "memory": 2.0, "attribution": 10.0}
STARTS_S = {"kernels": 0.5, "memory": 1.5, "attribution": 0.5}
STARTS_ON_CUDA_S = {"kernels": 2.0, "memory": 1.5, "attribution": 1.0}
ASKED_FIRST = ("stacks", "count")  # arms are chosen by these passes, and on a GPU by its kernels as well
DEAREST_PASS = 1 / 2  # of the time left: a longer pass leaves too little for what follows
BEFORE_ARMS = 0.35  # of the time after warm-up, for passes before the arms
FOR_PASSES = 0.5  # the same, as a limit: an instrument may slow a step more than expected
PASSES_AT = 0.5  # of the time for arms: then short postponed passes run; long ones come last
FEWEST_FOR_ARMS = 4  # steps: a stack sample, a real block, and one to keep an arm's results
SCREENING = 0.6  # of the time for arms, while arms that gained wait for more rounds
GAIN = 1.05  # a smaller gain is not worth a round
SUSPICIOUS = 0.1  # of the step: a single block without a gain does not clear an arm this suspicious
NARROW = 0.2  # an interval narrower than this share of the speed-up is narrow enough
NO_TIME, UNTIMED = "no time was left for it", "its steps could not be timed"
ENDED_FIRST = "the job ended first"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBlock:
    """Consecutive steps of one arm or instrument; the first ones are the transition into it."""

    arm: str
    num_steps: int
    num_untimed: int = 1


class WarmUp:
    """Decides, step by step, whether the job has reached its steady pace."""

    FEWEST, MOST, MOST_S = 4, 20, 20.0

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.reason = ""

    def add(self, step_s: float) -> bool:
        """Return True once steps stop getting faster; `reason` then says what decided it."""
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
            self.reason = f"not steady after {num} steps, {total_s:.0f} s; measured anyway"
            return True
        return False

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s[-2:])


def plan_passes(
    step_s: float, *, seconds: float, device: str = "cpu"
) -> tuple[list[StepBlock], list[StepBlock]]:
    """Return blocks before the arms, for steps of `step_s`, and passes for the time that the arms leave."""
    long = step_s >= LONG_STEP_S
    few = 1 if step_s >= SHORT_STEP_S else 2
    looks_s = max(0.0, min(STACKS_S, MOST_LOOKING * seconds))
    passes = [
        StepBlock(arm="count", num_steps=few),
        StepBlock(arm="stacks", num_steps=min(MOST_STACK_STEPS, max(1, math.ceil(looks_s / step_s)))),
        StepBlock(arm="kernels", num_steps=few),
        StepBlock(arm="memory", num_steps=4),
        # never next to the kernels' pass: a profiler session that begins in the hook in which another one
        # ended can crash in torch's profiler
        StepBlock(arm="attribution", num_steps=1 if long else attributed_steps(step_s)),
    ]
    real = baseline_block(REAL, step_s) if long else StepBlock(arm=REAL, num_steps=1 + 3)
    left_s = BEFORE_ARMS * seconds - step_s * real.num_steps
    if sum(pass_s(block, step_s, device=device) for block in passes) <= left_s:
        return [real, *passes], []
    if step_s * FEWEST_FOR_ARMS > seconds:
        return [real], passes
    asked = (*ASKED_FIRST, "kernels") if device == "cuda" and not long else ASKED_FIRST
    first = []
    for block in sorted(passes, key=lambda block: block.arm != "stacks"):
        took_s = pass_s(block, step_s, device=device)
        if block.arm == "stacks" or (block.arm in asked and took_s <= left_s):
            first.append(block)
            left_s -= took_s
    # the real block last, so that the first arm runs next to it
    return [*first, baseline_block(REAL, step_s)], [block for block in passes if block not in first]


def pass_s(block: StepBlock, step_s: float, *, device: str) -> float:
    """Estimate the seconds that a pass takes."""
    starts_s = STARTS_ON_CUDA_S if device == "cuda" else STARTS_S
    return step_s * block.num_steps * SLOWS[block.arm] + starts_s.get(block.arm, 0.0)


def attributed_steps(step_s: float) -> int:
    """Return how many steps to attribute: several if they are short, because a single one may be odd."""
    return min(MOST_ATTRIBUTED_STEPS, max(1, math.ceil(ATTRIBUTION_S / step_s)))


def last_steps(num_seen: int, *, seen_s: float, seconds_left: float) -> int:
    """Return how many more real steps to take at the end, after `num_seen` steps in `seen_s`."""
    if not num_seen or seen_s <= 0:
        return 0
    left_s, step_s = min(ENOUGH_REAL_S - seen_s, seconds_left), seen_s / num_seen
    enough = max(ENOUGH_REAL_STEPS, min(MOST_REAL_STEPS, math.ceil(ENOUGH_LOOKS_S / step_s)))
    return max(0, min(enough - num_seen, math.floor(left_s / step_s)))


def plan_rounds(step_s: float, *, seconds: float, labels: Iterable[str]) -> list[StepBlock]:
    """Plan fixed rounds, a block of each arm, for jobs whose ranks must act alike."""
    arms = [REAL, *labels]
    num_rounds, num_steps = FEWEST_ROUNDS, steps_per_block(step_s)
    round_s = step_s * len(arms) * num_steps
    while num_rounds < MOST_ROUNDS and round_s * (num_rounds + 1) < min(seconds, ROUNDS_TARGET_S):
        num_rounds += 1
    return [StepBlock(arm=arm, num_steps=num_steps) for _ in range(num_rounds) for arm in arms]


class Rounds:
    """Decides, block by block, which arm runs next."""

    def __init__(
        self,
        arms: Iterable[Arm],
        *,
        step_s: float,
        seconds: float,
        skipped: Mapping[str, str] | None = None,
        last: str | None = None,
        is_settled: Callable[[Arm, int, Counterfactual | None], bool] | None = None,
    ) -> None:
        """Let `is_settled` decide, by an arm's blocks and results, whether it needs no more blocks."""
        self._step_s, self._seconds, self._skipped = step_s, seconds, dict(skipped or {})
        self._asked = is_settled
        self._num_steps = steps_per_block(step_s)
        self._num_blocks: Counter[str] = Counter()
        self._num_beside: Counter[str] = Counter()  # of these, next to the arm's baseline
        self._refined: set[str] = set()
        self._parts: set[str] = set()  # labels of arms inside an arm that gained
        self._speedups: dict[str, float] = {}
        self._last = last  # the label of the previous block, if it may serve as a neighbour
        self._queue: list[str] = []
        self.arms: dict[str, Arm] = {}
        self.add(arms)

    def add(self, arms: Iterable[Arm]) -> None:
        for arm in arms:
            if arm.label not in self.arms:
                arm.refusal = self._skipped.get(arm.label, arm.refusal)
                self.arms[arm.label] = arm

    def interrupt(self) -> None:
        """Note that something else runs in between: the next block has no neighbour."""
        self._last, self._queue = None, []

    def next(
        self, *, seconds_left: float, measure: Callable[[Arm], Counterfactual | None]
    ) -> StepBlock | None:
        """Return the next block; none if every arm is settled or the time is up."""
        if not self._queue:
            self._queue = self._next_labels(seconds_left, measure)
        if not self._queue:
            return None
        before, self._last = self._last, self._queue.pop(0)
        self._num_blocks[self._last] += 1
        self._num_beside[self._last] += self._is_beside(before)
        if self._is_baseline_alone(self._last):
            return baseline_block(self._last, self._step_s)
        return StepBlock(arm=self._last, num_steps=self._steps_of(self._last))

    def _is_beside(self, before: str | None) -> bool:
        """Return whether the block that follows `before` can be compared: a baseline need not have one."""
        arm, neighbour = self.arms.get(self._last or ""), self.arms.get(before or "")
        if arm is None or before is None:
            return False
        return before == arm.baseline or (neighbour is not None and neighbour.baseline == arm.baseline)

    def _is_baseline_alone(self, label: str) -> bool:
        return label not in self.arms or self.arms[label].only_baseline

    def _steps_of(self, label: str) -> int:
        """Return enough steps to last as long as the baseline's: a short block can miss other jobs' load."""
        faster = max(1.0, self._speedups.get(label, 1.0))
        return 1 + round((self._num_steps - 1) * min(faster, LONGER))

    def _next_labels(self, seconds_left: float, measure: Callable[[Arm], Counterfactual | None]) -> list[str]:
        """Return a baseline block, and one or two arms beside it."""
        found = {label: measure(arm) for label, arm in self.arms.items() if self._num_blocks[label]}
        self._speedups = {label: gained.speedup for label, gained in found.items() if gained is not None}
        for label, gained in found.items():
            if gained is not None and gained.speedup >= GAIN and label not in self._refined:
                self._refined.add(label)
                parts = list(self.arms[label].refine())
                self._parts.update(part.label for part in parts)
                self.add(parts)
        wanted = self._wanted(found, seconds_left)
        if not wanted:
            return self._closing()
        chosen = [wanted[0], *(arm for arm in wanted[1:] if arm.baseline == wanted[0].baseline)][:2]
        beside = [] if self._last == chosen[0].baseline else [chosen[0].baseline]
        beside_s = sum(self._step_s * self._steps_beside(label) for label in beside)
        if beside_s + self._block_s(chosen[0]) > seconds_left:
            return []
        if beside_s + sum(map(self._block_s, chosen)) > seconds_left:
            chosen = chosen[:1]
        return [*beside, *(arm.label for arm in chosen)]

    def _steps_beside(self, label: str) -> int:
        alone = self._is_baseline_alone(label)
        return baseline_block(label, self._step_s).num_steps if alone else self._num_steps

    def _block_s(self, arm: Arm) -> float:
        """Estimate the seconds of an arm's block: its first step is unchanged, the others are faster."""
        return self._step_s * (1 + (self._num_steps - 1) * (1 - min(1.0, arm.suspicion)))

    def _closing(self) -> list[str]:
        """Return a last baseline block: the pace drifts, so each arm stands between two baselines."""
        last = self.arms.get(self._last or "")
        return [] if last is None else [last.baseline]

    def _wanted(self, found: Mapping[str, Counterfactual | None], seconds_left: float) -> list[Arm]:
        """Return the arms to run, most urgent first."""
        self._refuse_without_baseline()
        able = [arm for arm in self.arms.values() if arm.refusal is None and not arm.only_baseline]
        new = [arm for arm in able if not self._num_beside[arm.label]]
        # arms that prove a cause come before parts of a block, which only divide a known cost
        new.sort(key=lambda arm: (arm.label in self._parts or arm.suspicion < SUSPICIOUS, -arm.suspicion))
        open_ = [arm for arm in able if self._num_beside[arm.label] and not self._is_settled(arm, found)]
        # the arm that frees most gets its rounds first, however little time there is
        open_.sort(
            key=lambda arm: (self._num_beside[arm.label] >= FEWEST_ROUNDS, -_freed(arm, found[arm.label]))
        )
        in_screening = seconds_left > (1 - SCREENING) * self._seconds
        return [*new, *open_] if in_screening or not open_ else [*open_, *new]

    def _refuse_without_baseline(self) -> None:
        for arm in self.arms.values():
            if arm.refusal is None and arm.baseline != REAL:
                needed = self.arms.get(arm.baseline)
                if needed is None or needed.refusal is not None:
                    reason = needed.refusal if needed is not None else "was not proposed"
                    arm.refusal = f"it is compared with {arm.baseline} steps: {reason}"

    def _is_settled(self, arm: Arm, found: Mapping[str, Counterfactual | None]) -> bool:
        num, gained = self._num_beside[arm.label], found[arm.label]
        if self._asked is not None:
            return self._asked(arm, num, gained)
        if num < arm.fewest_rounds or num >= MOST_ROUNDS:
            return num >= MOST_ROUNDS
        if gained is None:
            return num > FEWEST_ROUNDS  # one more than the others: it may have asked for another baseline
        if gained.speedup < GAIN:
            return num >= FEWEST_ROUNDS or arm.suspicion < SUSPICIOUS
        return num >= FEWEST_ROUNDS and gained.speedup_high - gained.speedup_low < NARROW * gained.speedup

    def not_run(self, *, measured: Iterable[str], job_ended: bool = False) -> tuple[ArmNotRun, ...]:
        """Return the arms without a figure, with the reason."""
        done = set(measured)
        too_late = ENDED_FIRST if job_ended else NO_TIME
        untimed = ENDED_FIRST if job_ended else UNTIMED
        return tuple(
            ArmNotRun(
                kind=arm.kind,
                label=label,
                reason=arm.refusal or (untimed if self._num_blocks[label] else too_late),
                place=arm.place,
                last_line=arm.last_line,
            )
            for label, arm in self.arms.items()
            if label not in done and not (arm.only_baseline or arm.is_internal)
        )


def _freed(arm: Arm, gained: Counterfactual | None) -> float:
    """Return the share of the step that an arm frees, or may free."""
    return arm.suspicion if gained is None else 1 - 1 / gained.speedup


def steps_per_block(step_s: float) -> int:
    """Return the steps of a block: the transition and the timed ones."""
    return 1 + _kept_per_block(step_s)


def baseline_block(label: str, step_s: float) -> StepBlock:
    """Return a block of the steps that arms are compared with."""
    if step_s >= LONG_STEP_S:
        return StepBlock(arm=label, num_steps=1, num_untimed=0)
    return StepBlock(arm=label, num_steps=steps_per_block(step_s))


def _kept_per_block(step_s: float) -> int:
    if step_s >= LONG_STEP_S:
        return 1
    if step_s >= SHORT_STEP_S:
        return 2
    return min(MOST_STEPS_PER_BLOCK, max(4, round(ROUND_TARGET_S / step_s)))
