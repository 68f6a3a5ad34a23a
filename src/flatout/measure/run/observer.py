"""The observer: counts a job's steps and gives each instrument the steps that are its own.

It lives in the job's process and acts only at step ends, on the training thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flatout.measure.arms.leave_out import LeaveOut
from flatout.measure.clock import EXCLUDED, REST, Clock, DeviceMarks, ident, now
from flatout.measure.evidence import Arm
from flatout.measure.lines.lookout import Lookout
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.patches import Patches
from flatout.measure.phases import install_phases, install_transfers, narrow_modules
from flatout.measure.run import steps
from flatout.measure.run.passes import Passes
from flatout.measure.run.ranks import Agreement
from flatout.measure.run.schedule import FEWEST_ROUNDS, StepBlock, WarmUp, plan_blocks
from flatout.measure.run.steps import EXPLICIT, OPTIMIZER_STEP, Anchor, Key
from flatout.measure.user_code import UserCode

ENOUGH_S = 15.0
HANGS_S, HANGS = 8.0, 5  # a block without a statement: at least, and as a multiple of a real block's time
KEPT_STEPS = 8  # of a real block, to be served again in the counterfactual ones
DETAILED_STEPS = 8  # of a block whose phases are marked on the GPU's stream; the others' ends only


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverOptions:
    """What a diagnosis may do to the job."""

    folder: str
    seconds: float = 60.0
    counterfactuals: bool = True  # False where the job's own training is to be kept as it is
    half: bool = True  # False after the job failed on half a batch
    leave_out: bool = True  # False after the job failed without a statement of its own


@dataclass(slots=True)
class StepRow:
    """One step as it was noted, before the GPU's clock was read."""

    index: int
    arm: Arm
    block: int
    transition: bool
    totals: list[float]
    marks: list[tuple[int, Any]]
    rows: int | None
    num_batches: int
    num_forwards: int
    num_backwards: int
    epoch_start: bool
    begins_epoch: bool = False  # of the loader that is trained on
    ended_at_s: float = 0.0

    @property
    def host_s(self) -> float:
        return sum(self.totals) - self.totals[EXCLUDED]


class Observer:
    """Installed once per process; `on_finished` is called at the end of the last planned step."""

    def __init__(
        self,
        options: ObserverOptions,
        *,
        on_finished: Callable[[], None],
        on_progress: Callable[[str], None] = lambda message: None,
        on_block_end: Callable[[], None] = lambda: None,
        on_stuck: Callable[[], None] = lambda: None,
        make_warm_up: Callable[[], WarmUp] = WarmUp,
    ) -> None:
        self.options = options
        self.on_finished, self.on_progress, self.on_block_end = on_finished, on_progress, on_block_end
        self.on_stuck, self.make_warm_up = on_stuck, make_warm_up
        self.patches = Patches()
        self._narrowed = Patches()
        self.outermost_types: set[type] = set()
        self.clock = Clock()
        self.marks: DeviceMarks | None = None
        self.user_code = UserCode(options.folder)
        self.loaders = LoaderWatch(self.clock, self.user_code)
        self.lookout = Lookout(self.clock, self.user_code)
        self.anchor = Anchor()
        self.agreement = Agreement()
        self.tools = Passes(self.user_code, self.clock)
        self.left_out = LeaveOut(self.user_code)
        self.optimizer: Any = None
        self.device = "cpu"
        self.num_forwards = self.num_backwards = 0
        self.finished = False
        self.removed = False
        self._restart()

    def _restart(self) -> None:
        self.rows: list[StepRow] = []
        self.warm_up: WarmUp | None = self.make_warm_up()
        self.warmup_reason: str | None = None
        self.blocks: list[StepBlock] = []
        self.block_number = 0
        self.position = 0
        self.begun = False
        self._planned_at = now()
        self._anchor_key: Key | None = None
        self._counts = (0, 0, 0)
        self._narrowed.undo()
        self.loaders.begin_serving(None)
        self.loaders.keeping = False

    # -- installation

    def install_switches(self) -> None:
        """Before the job's own sources are compiled."""
        if self.options.counterfactuals and self.options.leave_out:
            self.left_out.install(self.patches)

    def install(self) -> None:
        """Watch torch, which this imports."""
        install_phases(self, self.patches)
        self.loaders.install(self.patches)
        self.lookout.start()
        self.patches.on_undo(self.lookout.stop)
        steps.listen(lambda: self.mark((EXPLICIT, 0), "flatout.step"))
        self.patches.on_undo(lambda: steps.listen(None))
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_in_child(reference()))

    def remove(self) -> None:
        """Take every instrument off; the job runs on as if it had never been observed."""
        if not self.finished and self.warm_up is None and self.blocks:
            self._end_block(self.arm)
        self.removed = True  # for what the script holds on to: a patched function under a name of its own
        self._narrowed.undo()
        self.patches.undo()

    # -- marks

    @property
    def arm(self) -> Arm:
        if self.warm_up is not None or not self.blocks:
            return "warmup"
        return self.blocks[min(self.block_number, len(self.blocks) - 1)].arm

    def adopt_thread(self) -> bool:
        """True on the training thread; the first optimizer step says which one that is."""
        if ident() == self.clock.owner:
            return True
        if self.begun or os.getpid() != self.loaders.pid:
            return False
        self.clock.owner = ident()
        self.clock.restart()
        return True

    def note_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.loaders.num_steps += 1

    def after_model_call(self, key: Key, name: str) -> None:
        """A model call or backward: ends a step only in loops without an optimizer."""
        frozen = self.anchor.frozen
        if frozen is not None and frozen != key:
            return  # the usual case: kept short, it is part of every step
        if any(kind <= OPTIMIZER_STEP for kind, _ in self.anchor.counts):
            return
        self.mark(key, name)

    def mark(self, key: Key, name: str) -> None:
        if self.removed or not self.adopt_thread():
            return
        if self.finished:  # the script swallowed the end; say it again
            self.on_finished()
            return
        if self.anchor.outranks(key):  # an evaluation ran first: what was measured was no training step
            if self.warm_up is None:
                self._end_block(self.arm)
            self.anchor = Anchor()
            self._restart()
        if not self.anchor.add(key, name):
            return
        if self._anchor_key != self.anchor.current:
            self._restart()
            self._anchor_key = self.anchor.current
        if key[0] != OPTIMIZER_STEP:
            self.loaders.num_steps += 1
        self._step_end()

    # -- steps

    def _step_end(self) -> None:
        totals = self.clock.take()
        marks = self.marks.take() if self.marks is not None else []
        block = self.block_number
        if self.begun:
            self._note_row(totals, marks)
            self._advance()
        self.begun = True
        self.loaders.keeping = self._is_kept_next()
        self._counts = (self.loaders.num_batches, self.num_forwards, self.num_backwards)
        self.loaders.forget_step()
        self._find_device()
        self.clock.take()  # what this took belongs to no step
        if self.marks is not None:
            self.marks.detailed = self.position < DETAILED_STEPS
            if self.position == 0 or self.block_number != block:
                self.marks.restart()

    def _is_kept_next(self) -> bool:
        """The last batches of a real block are kept: holding more costs every step that follows."""
        if self.warm_up is not None or self.finished or self.arm != "real":
            return False
        return self.position >= self.blocks[self.block_number].num_steps - KEPT_STEPS

    def _note_row(self, totals: list[float], marks: list[tuple[int, Any]]) -> None:
        batches, forwards, backwards = self._counts
        self.rows.append(
            StepRow(
                index=self.anchor.counts[self._anchor_key or (0, 0)],
                arm=self.arm,
                block=self.block_number,
                transition=self.position == 0 or self.loaders.fell_back,
                totals=totals,
                marks=marks,
                rows=self.loaders.rows,
                num_batches=self.loaders.num_batches - batches,
                num_forwards=self.num_forwards - forwards,
                num_backwards=self.num_backwards - backwards,
                epoch_start=self.loaders.epoch_began,
                begins_epoch=self.loaders.training_epoch_began,
                ended_at_s=self.clock.last,
            )
        )

    def _find_device(self) -> None:
        """The GPU is found by the optimizer's parameters, in warm-up; transfers are timed from then on."""
        if self.marks is not None or self.warm_up is None:
            return
        import torch

        if not torch.cuda.is_initialized():
            return
        parameters = (
            [p for group in self.optimizer.param_groups for p in group["params"]] if self.optimizer else []
        )
        if self.optimizer is None or any(parameter.is_cuda for parameter in parameters):
            self.device = "cuda"
            self.marks = DeviceMarks()
            install_transfers(self, self.patches)

    def _advance(self) -> None:
        row = self.rows[-1]
        if self.warm_up is not None:
            self.position = 1
            ready = self.warm_up.add(row.host_s)
            plan = self.agreement.plan(row.index, ready, lambda: self._plan(self.warm_up))
            if plan is not None:
                self.warmup_reason = self.warm_up.reason or "as rank 0 decided"
                self.settle()
                self.warm_up, self.blocks, self.block_number, self.position = None, plan, 0, 0
                self._planned_at = now()
                self._begin_block(self.arm)
            return
        self.tools.step_end()
        self.position += 1
        if self.position < self.blocks[self.block_number].num_steps:
            return
        self._end_block(self.arm)
        self._plan_without()
        self.block_number += 1
        self.position = 0
        self.on_block_end()
        if self.block_number == len(self.blocks) or self._is_enough():
            self.finished = True
            self.on_finished()
        else:
            self._begin_block(self.arm)

    def settle(self) -> None:
        """Warm-up has shown what marks a step and which modules are called outermost: watch no more."""
        self.anchor.freeze()
        narrow_modules(self, self._narrowed)

    def _is_enough(self) -> bool:
        """Past the fewest rounds, time decides: epoch starts can make a round far longer than planned."""
        if self.agreement.shared or self.blocks[self.block_number].arm != "real":
            return False
        num_rounds = sum(block.arm == "real" for block in self.blocks[: self.block_number]) - 1
        return num_rounds >= FEWEST_ROUNDS and now() - self._planned_at > ENOUGH_S

    def _plan(self, warm_up: WarmUp | None) -> list[StepBlock]:
        trained_on = self.loaders.trained_on()
        cached = self.options.counterfactuals and trained_on is not None
        if self.options.counterfactuals and trained_on is None:
            self.tools.missing.append("counterfactuals: no DataLoader batch was followed by a training step")
        if not self.options.counterfactuals:
            self.tools.missing.append("counterfactuals: left out, the training that runs on stays as written")
        if self.options.counterfactuals and not self.options.half:
            self.tools.missing.append("half batch: the script raised on half a batch")
        if self.options.counterfactuals and not self.options.leave_out:
            self.tools.missing.append("leaving a statement out: the script raised or hung without it")
        step_s = warm_up.step_s if warm_up is not None else 1.0
        return plan_blocks(
            step_s, seconds=self.options.seconds, cached=cached, half=cached and self.options.half
        )

    def _plan_without(self) -> None:
        """After the stacks were looked at: a block without the heaviest statement before each real one."""
        stacks = self.tools.stacks
        if self.arm != "stacks" or stacks is None or self.agreement.shared:
            return
        timed = [row for row in self.rows if row.arm == "real" and not row.transition]
        rest_s, step_s = sum(row.totals[REST] for row in timed), sum(row.host_s for row in timed)
        if not step_s or not self.left_out.choose(stacks, rest_share=rest_s / step_s):
            return
        planned = self.block_number + 1
        self.blocks[planned:] = [
            each
            for block in self.blocks[planned:]
            for each in ([replace(block, arm="without"), block] if block.arm == "real" else [block])
        ]

    # -- blocks

    def _begin_block(self, arm: Arm) -> None:
        done, total = self.block_number + 1, len(self.blocks)
        self.on_progress(f"{arm}: block {done} of {total}, {self.blocks[self.block_number].num_steps} steps")
        self.loaders.begin_serving(arm if arm in ("cached", "half") else None)
        self.loaders.recording = arm == "real"
        self.loaders.counts_rows = arm in ("real", "without")
        if arm == "without":
            self.left_out.switch(True)
            self.left_out.watch(longest_s=self._longest_without_s(), on_stuck=self.on_stuck)
        self.tools.begin(arm, self.device)

    def _longest_without_s(self) -> float:
        """A block without a statement that takes longer than this hangs."""
        steps_s = [row.host_s for row in self.rows if row.arm == "real"]
        block_s = sum(steps_s) / max(1, len(steps_s)) * self.blocks[self.block_number].num_steps
        return max(HANGS_S, HANGS * block_s)

    def _end_block(self, arm: Arm) -> None:
        if arm == "without":
            self.left_out.switch(False)
        self.tools.end(
            arm, [row.host_s for row in self.rows if row.block == self.block_number and row.arm == arm]
        )


def _leave_in_child(observer: Observer | None) -> None:
    """A process the job forks (a worker, an environment, another trainer) is not the job."""
    if observer is not None and not observer.removed:
        observer.tools.leave_in_child()
        observer.left_out.put_back()
        observer.removed = True
        observer.patches.undo()
