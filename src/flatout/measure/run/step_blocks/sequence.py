"""The blocks of one job: those planned ahead, then the next one as long as there is time.

Ranks follow one plan, made before the first block.  A single process plans only the passes of its instruments
and asks for every further block when the last one has ended: the passes say which arms are worth a block, and
an arm that gains gets more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from flatout.measure.arms.arm import REAL, UNWATCHED, Arm, ArmContext, Propose, Same
from flatout.measure.arms.batches import kept_batches
from flatout.measure.evidence import INSTRUMENTS, ArmNotRun, Counterfactual
from flatout.measure.run.passes import Passes
from flatout.measure.run.ranks import unsynchronised
from flatout.measure.run.ranks.agreement import Agreement
from flatout.measure.run.step_blocks.deadline import Deadline
from flatout.measure.run.step_blocks.schedule import (
    DEAREST_PASS,
    ENDED_FIRST,
    FOR_PASSES,
    LONG_STEP_S,
    PASSES_AT,
    Rounds,
    StepBlock,
    last_steps,
    pass_s,
    plan_passes,
    plan_rounds,
)
from flatout.measure.run.step_rows import StepRow, Watching, build_steps, real_step_s, watching
from flatout.measure.statistics import compare

if TYPE_CHECKING:
    from flatout.measure.run.observer import ObserverOptions

MOST_RECOUNTS = 3  # of steps that turn out to hold a game or an evaluation


class BlockSequence:
    """Decides which block comes next.

    `rows` are the recorded steps, to which the observer adds; `skipped` says how the job failed under an arm
    before; `context` makes what proposers of arms see.
    """

    def __init__(
        self,
        options: ObserverOptions,
        rows: list[StepRow],
        *,
        agreement: Agreement,
        deadline: Deadline,
        tools: Passes,
        skipped: dict[str, str],
        context: Callable[[], ArmContext],
    ) -> None:
        self._options, self._rows, self._agreement = options, rows, agreement
        self._deadline, self._tools, self._skipped, self._context = deadline, tools, skipped, context
        self._device = "cpu"
        self.blocks: list[StepBlock] = []
        self.number = 0  # of the current block
        self.arms: dict[str, Arm] = {}
        self.rounds: Rounds | None = None
        self._later: list[StepBlock] = []  # passes for the time that the arms leave
        self._for_arms_s = 0.0  # seconds reserved for arms, whatever the instruments take
        self._first_round = 0  # the number of the first block of an arm
        self._proposed_again = False
        self._saw_last = False
        self._recounts = 0
        self._watching = (0, 0), Watching()  # as it was after so many steps without notes, and long ones

    @property
    def block(self) -> StepBlock:
        """The current block, or the last one when all are over."""
        return self.blocks[min(self.number, len(self.blocks) - 1)]

    @property
    def is_over(self) -> bool:
        return self.number == len(self.blocks)

    @property
    def has_run_real(self) -> bool:
        """Whether a block of unchanged steps is over."""
        return any(block.arm == REAL for block in self.blocks[: self.number])

    # -- planned ahead

    def plan(self, step_s: float, *, device: str) -> list[StepBlock]:
        """Return the blocks known in advance: the instruments', or all of them if ranks must agree."""
        self._device = device
        if not self._options.counterfactuals:
            self._tools.missing.append("arms: left out, so that training continues as written")
        seconds = self._deadline.seconds_left
        self._for_arms_s = (1 - FOR_PASSES) * seconds
        blocks, self._later = plan_passes(step_s, seconds=seconds, device=device)
        if self._agreement.is_needed:
            self.leave_out_later()
            self._later = []
        if self._agreement.is_needed and self._options.counterfactuals:
            able = [arm for arm in self.propose_for_ranks() if arm.refusal is None]
            labels = [arm.label for arm in able if not arm.only_baseline]
            blocks += plan_rounds(step_s, seconds=self._deadline.seconds_left, labels=labels)
        return blocks

    def begin(self, blocks: list[StepBlock]) -> None:
        """Follow a plan from its first block on."""
        self.blocks, self.number = blocks, 0

    def propose_for_ranks(self) -> list[Arm]:
        """Return arms that every rank can run, independent of what a single rank has seen."""
        self.rounds = Rounds(
            self._propose((kept_batches.propose, unsynchronised.propose)),
            step_s=1.0,
            seconds=self._deadline.seconds_left,
            skipped=self._skipped,
        )
        self.arms = self.rounds.arms
        return list(self.arms.values())

    def count_again(self) -> None:
        """Repeat a count of steps that were not usual: what a game calls would be said of every step."""
        if self._recounts < MOST_RECOUNTS:
            self._recounts += 1
            self.blocks.insert(self.number + 1, self.block)

    def drop_passes(self) -> None:
        """Drop passes so that the arms keep their part of the time."""
        if self.rounds is None and self._deadline.seconds_left < self._for_arms_s:
            ahead = self.blocks[self.number :]
            self.blocks[self.number :] = [block for block in ahead if block.arm not in INSTRUMENTS]
            self._leave_out(block for block in ahead if block.arm in INSTRUMENTS)

    def leave_out_later(self) -> None:
        """Say that the postponed passes do not run."""
        self._leave_out(self._later)

    def _leave_out(self, passes: Iterable[StepBlock]) -> None:
        self._tools.missing += [f"{block.arm}: no time was left for this pass" for block in passes]

    # -- one after the other

    def next_blocks(self, num_steps: int) -> list[StepBlock]:
        """Return the next block after the instruments: one of an arm or of its baseline.

        `num_steps` of the job have ended.
        """
        if self._agreement.shared:
            return []
        if not self._options.counterfactuals:
            return self._last_block() or self._next_pass()
        num_plain = self._options.plain_steps - num_steps
        if self.rounds is None and num_plain > 0:
            return [StepBlock(arm=REAL, num_steps=num_plain)]
        if self.rounds is None:
            same = [Same()] if self._options.same else []
            self.rounds = Rounds(
                [*same, *self._propose(self._options.proposers)],
                step_s=real_step_s(self._rows),
                seconds=self._deadline.seconds_left,
                skipped=self._skipped,
                last=REAL if self.blocks[-1].arm == REAL else None,
            )
            self.arms = self.rounds.arms
            self._for_arms_s, self._first_round = self._deadline.seconds_left, self.number
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()  # so that the GPU's clock of every step so far can be read
        self._propose_again()
        are_due = self._are_passes_due()
        block = None if are_due else self._next_round()
        if block is None and self._later:
            others = ([] if are_due else self._last_block()) or self._next_pass()
            if others:
                return others
            self._propose_again()
            block = self._next_round()
        return [block] if block is not None else self._last_block()

    def _propose(self, proposers: Iterable[Propose]) -> Iterable[Arm]:
        context = self._context()
        for propose in proposers:
            with self._tools.guard(f"arms of {propose.__module__.rpartition('.')[2]}"):
                yield from propose(context)

    def _propose_again(self) -> None:
        """Propose arms once more, when the postponed passes are over, by what they found."""
        assert self.rounds is not None
        came_later = any(block.arm in INSTRUMENTS for block in self.blocks[self._first_round :])
        if came_later and not self._later and not self._proposed_again:
            self._proposed_again = True
            self.rounds.add(self._propose(self._options.proposers))

    def _are_passes_due(self) -> bool:
        """Return whether postponed passes come before more arms: not if each takes several seconds."""
        if not self._later or self._deadline.seconds_left >= PASSES_AT * self._for_arms_s:
            return False
        return real_step_s(self._rows) < LONG_STEP_S

    def _next_round(self) -> StepBlock | None:
        assert self.rounds is not None
        return self.rounds.next(seconds_left=self._deadline.seconds_left, measure=self.result_of)

    def _next_pass(self) -> list[StepBlock]:
        """Return one of the postponed passes, if it fits into the time left."""
        step_s = real_step_s(self._rows)
        while self._later:
            block = self._later.pop(0)
            if pass_s(block, step_s, device=self._device) > DEAREST_PASS * self._deadline.seconds_left:
                self._leave_out([block])
                continue
            if self.rounds is not None:
                self.rounds.interrupt()
            # a profiler session must not begin in the hook in which another one ended
            apart = [StepBlock(arm=REAL, num_steps=1)] if self.blocks[-1].arm == "kernels" else []
            return [*apart, block]
        return []

    def _last_block(self) -> list[StepBlock]:
        """Add unchanged steps if few were seen: something that comes once in many steps may show."""
        real = [row for row in self._rows if row.arm == REAL]
        seen_s = sum(row.host_s for row in real)
        num_steps = last_steps(len(real), seen_s=seen_s, seconds_left=self._deadline.seconds_left)
        if self._saw_last or not num_steps:
            return []
        self._saw_last = True
        return [StepBlock(arm=REAL, num_steps=num_steps)]

    # -- results

    def result_of(self, arm: Arm) -> Counterfactual | None:
        """Return what an arm has shown so far."""
        rows = [row for row in self._rows if row.arm in (arm.label, arm.baseline)]
        notes = Watching() if arm.label == UNWATCHED else self.watching()
        steps = build_steps(rows, watching_s=notes.seconds)
        found = compare(steps, label=arm.label, baseline=arm.baseline, kind=arm.kind)
        return found if found is None or not notes.seconds else notes.taken_off(found)

    def watching(self) -> Watching:
        """Return what the notes on a step add to it."""
        seen = sum(row.arm == UNWATCHED for row in self._rows), sum(row.apart for row in self._rows)
        if seen != self._watching[0]:
            self._watching = seen, watching(self._rows)
        return self._watching[1]

    def acquit(self, labels: Iterable[str]) -> None:
        """Note that the job does not fail because of these arms."""
        for label in labels:
            reason, self._skipped[label] = self._skipped[label], ENDED_FIRST
            for arm in self.arms.values():  # also those that are compared with it
                if label in (arm.label, arm.baseline) and reason in (arm.refusal or ""):
                    arm.refusal = ENDED_FIRST

    def arms_not_run(self, measured: Iterable[str], *, job_ended: bool = False) -> tuple[ArmNotRun, ...]:
        """Return arms without a figure, and arms that failed before and were not proposed again.

        `job_ended`: the job came to its own end, and so did the time for its arms.
        """
        found = self.rounds.not_run(measured=measured, job_ended=job_ended) if self.rounds is not None else ()
        known = {*self.arms, *(arm.label for arm in found)}
        return found + tuple(
            ArmNotRun(kind=label.partition(" ")[0], label=label, reason=reason)
            for label, reason in self._skipped.items()
            if label not in known
        )
