"""The observer counts a job's steps and assigns them to instruments and arms.

It lives in the job's process and acts only when steps end, on the training thread.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.ground.units import show_seconds
from flatout.measure.arms.arm import REAL, UNWATCHED, Arm, ArmContext, Propose
from flatout.measure.arms.batches.batch_statements import BatchStatements
from flatout.measure.arms.knock_out.leave_out import LeaveOut
from flatout.measure.arms.proposers import PROPOSERS
from flatout.measure.arms.unwatched import StepEnd
from flatout.measure.clock import NUM_REGIONS, REST, Clock, DeviceMarks, ident, now, phases_s
from flatout.measure.evidence import Place
from flatout.measure.lines.stack_watch import StackWatch
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.loading.workers import CORES
from flatout.measure.patches import Patches
from flatout.measure.phases import install_phases, install_transfers, narrow_modules
from flatout.measure.process.watch import ProcessWatch
from flatout.measure.run import steps
from flatout.measure.run.episodes import heaviest
from flatout.measure.run.lineage import UNFINISHED
from flatout.measure.run.passes import Passes
from flatout.measure.run.ranks.agreement import Agreement, group_store
from flatout.measure.run.ranks.network import measure_network
from flatout.measure.run.ranks.other_trainers import OtherTrainers
from flatout.measure.run.step_blocks.deadline import Deadline, Watchdog
from flatout.measure.run.step_blocks.schedule import StepBlock, WarmUp
from flatout.measure.run.step_blocks.sequence import BlockSequence
from flatout.measure.run.step_rows import StepRow, real_rows, real_step_s, usual_forwards
from flatout.measure.run.steps import BACKWARD_CALL, EXPLICIT, MODEL_CALL, OPTIMIZER_STEP, Anchor, AnchorKey
from flatout.measure.statistics import typical_steps
from flatout.measure.user_code import UserCode, framework_around

WAIT_S = 1.0  # for the first backward pass, again and again until the time is up
MOST_SHOWN = 4  # lines of a step that was cut short, outermost first
HANGS_S, HANGS = 8.0, 5  # a block of an arm: at least these seconds, and this multiple of a real block's time
FEWEST_WARM_UP = 2  # steps, if the time is up before the job is warm
KEPT_STEPS = 8  # of a real block, to be served again in counterfactual blocks
FEWEST_FOR_ARMS = 10  # steps: warm-up, a real one, passes and a few arms
DETAILED_STEPS = 8  # of a block, with phases marked on the GPU's stream; the others mark only their ends


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserverOptions:
    """What a diagnosis may do to the job."""

    folder: str
    seconds: float = 60.0  # for the whole diagnosis
    began_s: float | None = None  # when it began, on the monotonic clock; None: now
    counterfactuals: bool = True  # False if the job's own training must stay as it is
    skipped: Mapping[str, str] = field(default_factory=dict)  # arms under which the job failed, and how
    plain_steps: int = 0  # before the first arm: an earlier run failed after as many, perhaps by itself
    any_thread: bool = True  # False if the thread that made the observer trains
    same: bool = False  # also measure steps under which nothing changes
    proposers: tuple[Propose, ...] = PROPOSERS


class JobListener:
    """Hears from an observer how its job goes; a subclass acts on what it needs to know."""

    def finished(self) -> None:
        """Hear that the last planned step ended."""

    def progress(self, message: str) -> None:
        """Hear that a block of steps begins."""

    def block_ended(self) -> None:
        """Hear that the steps of a block are measured."""

    def stuck(self, arm: Arm) -> None:
        """Hear that the steps of an arm hang, although it runs them unchanged by now."""

    def overdue(self) -> None:
        """Hear that the time is up while a step still runs."""

    def due(self, seconds: float) -> None:
        """Hear that the job will be overdue in `seconds`, unless something else is said."""


class Observer:
    """Watches the job of this process; there is one."""

    def __init__(self, options: ObserverOptions, listener: JobListener | None = None) -> None:
        self.options, self.listener = options, listener or JobListener()
        self.patches = Patches()
        self._narrowed = Patches()
        self.outermost_types: set[type] = set()
        self.clock = Clock()
        self.marks: DeviceMarks | None = None
        self.user_code = UserCode(options.folder)
        self.loaders = LoaderWatch(self.clock, self.user_code)
        self.stack_watch = StackWatch(self.clock, self.user_code, on_look=self._look_at_time)
        self.anchor = Anchor()
        self.agreement = Agreement()
        self.other_trainers = OtherTrainers()
        self.tools = Passes(self.user_code, self.clock)
        self.left_out = LeaveOut(self.user_code)
        self.batch_statements = BatchStatements(self.user_code, self.loaders)
        self.process = ProcessWatch(self.clock, self.user_code)
        self.watchdog = Watchdog()
        self.deadline = Deadline(options.seconds, began_s=options.began_s)
        self.skipped = dict(options.skipped)
        self.optimizer: Any = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made_at: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self.device = "cpu"
        self.framework: str | None = None
        self.num_forwards = self.num_backwards = 0
        self.num_arms = 0  # blocks of arms that have begun, and may change what is trained
        self.finished = False
        self.removed = False
        self._restart()

    def _restart(self) -> None:
        self.rows: list[StepRow] = []
        self.warm_up: WarmUp | None = WarmUp()
        self.warmup_reason: str | None = None
        self.sequence = BlockSequence(
            self.options,
            self.rows,
            agreement=self.agreement,
            deadline=self.deadline,
            tools=self.tools,
            skipped=self.skipped,
            context=self._context,
        )
        self.position = 0  # in the current block
        self.begun = False
        self.out_of_time = False
        self._anchor_key: AnchorKey | None = None
        self._counts = (0, 0, 0)
        self._ends: list[StepEnd] | None = None  # of an unwatched block
        self._waited_in_line_s = 0.0
        self._step_began_s = self.clock.last
        self._narrowed.undo()
        self.loaders.begin_serving(None)
        self.loaders.keeping = False

    # -- installation

    def install_switches(self) -> None:
        """Install switches before the job's own sources are compiled."""
        if self.options.counterfactuals:
            self.batch_statements.install(self.left_out, self.patches)
            self.left_out.install(self.patches)

    def install(self) -> None:
        """Import torch and watch it."""
        install_phases(self, self.patches)
        self.loaders.install(self.patches)
        self.process.install(self.patches)
        self.stack_watch.start()
        self.patches.on_undo(self.stack_watch.stop)
        steps.listen(lambda: self.mark((EXPLICIT, 0), "flatout.step"))
        self.patches.on_undo(lambda: steps.listen(None))
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_in_child(reference()))

    def remove(self) -> None:
        """Remove every instrument; the job continues as if it had never been observed."""
        if not self.finished and self.warm_up is None and self.sequence.blocks:
            self._end_block(self.arm)
        self.removed = True  # for patched functions that the script still holds under another name
        self._narrowed.undo()
        self.patches.undo()

    # -- marks

    @property
    def arm(self) -> str:
        """The label of the current steps."""
        if self.warm_up is not None or not self.sequence.blocks:
            return "warmup"
        return self.sequence.block.arm

    @property
    def arm_under_way(self) -> Arm | None:
        """The arm of the current steps, if any."""
        return None if self.finished or self.removed else self.sequence.arms.get(self.arm)

    def has_cut_training_short(self, *, since: int) -> bool:
        """Return whether an arm may have ended a `step` of L-BFGS that is all of the training.

        Without a block the loss stays the same and gradients vanish, so the optimizer believes that it is
        done, then or later.  `since` is the number of backward passes before the call.
        """
        if self.finished or self.removed or not self.num_arms or self.anchor.current is None:
            return False
        return self.anchor.current[0] == BACKWARD_CALL and self.num_backwards > since

    def adopt_thread(self) -> bool:
        """Return whether this is the training thread; the first optimizer step decides which one is."""
        if ident() == self.clock.owner:
            return True
        if self.begun or not self.options.any_thread or os.getpid() != self.loaders.pid:
            return False
        self.clock.owner = ident()
        self.clock.restart()
        return True

    def note_optimizer(self, optimizer: Any) -> None:
        if self.optimizer is not optimizer:
            self.optimizer = optimizer
            self.optimizers.add(optimizer)
        self.process.training.note_optimizer(optimizer)
        self.loaders.num_steps += 1

    def after_model_call(self, key: AnchorKey, name: str) -> None:
        """Note a model call or backward, which ends a step only in loops without an optimizer."""
        frozen = self.anchor.frozen
        if frozen is not None and frozen != key and frozen[0] <= key[0]:
            return  # the usual case: kept short, because every step runs it
        if any(kind <= OPTIMIZER_STEP for kind, _ in self.anchor.counts):
            return
        self.mark(key, name)

    def mark(self, key: AnchorKey, name: str) -> None:
        if self.removed or not self.adopt_thread():
            return
        if self.finished:  # the script swallowed the end, so repeat it
            self.listener.finished()
            return
        if self._ends is not None and key == self._anchor_key and self._note_end(self._ends):
            return
        if self.anchor.outranks(key):  # an evaluation ran first: what was measured was not a training step
            if not self.anchor.gives_way(key):
                return
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

    def _note_end(self, ends: list[StepEnd]) -> bool:
        """Note the end of a step of an unwatched block; return whether its block continues."""
        loaders, clock = self.loaders, self.clock
        counts = loaders.num_batches, self.num_forwards, self.num_backwards
        begun = loaders.epoch_began, loaders.training_epoch_began
        ends.append(StepEnd(now(), clock.totals.copy(), *counts, *begun))
        loaders.epoch_began = loaders.training_epoch_began = False
        if len(ends) == self.sequence.block.num_steps:
            return False
        if self._anchor_key is not None and self._anchor_key[0] != OPTIMIZER_STEP:
            loaders.num_steps += 1
        return True

    def _note_unwatched(self, ends: list[StepEnd]) -> None:
        """Make rows of the steps of an unwatched block, the last of which the anchor has counted."""
        before = StepEnd(self._step_began_s, [0.0] * NUM_REGIONS, *self._counts)
        key, block = self._anchor_key or (0, 0), self.sequence.block
        self.anchor.counts[key] -= 1
        for number, end in enumerate(ends):
            totals = [after - earlier for after, earlier in zip(end.totals, before.totals, strict=True)]
            totals[REST] += end.time_s - before.time_s - sum(totals)
            self.anchor.counts[key] += 1
            self.rows.append(
                StepRow(
                    index=self.anchor.counts[key],
                    arm=block.arm,
                    block=self.sequence.number,
                    transition=number < block.num_untimed,
                    totals=totals,
                    marks=[],
                    rows=None,
                    num_batches=end.num_batches - before.num_batches,
                    num_forwards=end.num_forwards - before.num_forwards,
                    num_backwards=end.num_backwards - before.num_backwards,
                    epoch_start=end.epoch_start,
                    begins_epoch=end.begins_epoch,
                    ended_at_s=end.time_s,
                )
            )
            before = end
        self.position = block.num_steps - 1

    def _step_end(self) -> None:
        totals = self.clock.take()
        marks = self.marks.take() if self.marks is not None else []
        block = self.sequence.number
        self.process.step_end(self.arm)
        if self.begun:
            if self._ends:
                self._note_unwatched(self._ends)
            else:
                self._note_row(totals, marks)
            self._advance()
        else:
            self.framework = framework_around(sys._getframe())
        self._in_line_s()
        if self.deadline.first_step_s is None:
            self.deadline.note_first_step()
            self._announce()  # at once: the next step may never end
        self.begun = True
        self.loaders.keeping = self._is_kept_next()
        self._counts = (self.loaders.num_batches, self.num_forwards, self.num_backwards)
        self.loaders.forget_step()
        self._find_device()
        self.process.garbage.forget_step()
        self.clock.take()  # this work belongs to no step
        self._step_began_s = self.clock.last
        if self.marks is not None:
            self.marks.detailed = self.position < DETAILED_STEPS
            if self.position == 0 or self.sequence.number != block:
                self.marks.restart()

    def _is_kept_next(self) -> bool:
        """Return whether to keep the next batch: only a real block's last ones, because more cost time."""
        if self.warm_up is not None or self.finished or self.arm != "real":
            return False
        return self.position >= self.sequence.block.num_steps - KEPT_STEPS

    def _note_row(
        self, totals: list[float], marks: list[tuple[int, Any]], *, unfinished: bool = False
    ) -> None:
        batches, forwards, backwards = self._counts
        fell_back = self._fell_back()  # in transitions too: it is asked once per step
        self.rows.append(
            StepRow(
                index=self.anchor.counts[self._anchor_key or (0, 0)] + unfinished,
                arm=self.arm,
                block=self.sequence.number,
                transition=self._is_transition() or fell_back or unfinished,
                totals=totals,
                marks=marks,
                rows=self.loaders.rows,
                num_batches=self.loaders.num_batches - batches,
                num_forwards=self.num_forwards - forwards,
                num_backwards=self.num_backwards - backwards,
                epoch_start=self.loaders.epoch_began,
                begins_epoch=self.loaders.training_epoch_began,
                ended_at_s=self.clock.last,
                in_line_s=self._in_line_s(),
            )
        )

    def _is_transition(self) -> bool:
        """Return whether the step only leads into its block."""
        if self.warm_up is not None or not self.sequence.blocks:
            return self.position == 0
        return self.position < self.sequence.block.num_untimed

    def _in_line_s(self) -> float:
        """Return how long the thread waited for a core since the last call."""
        before_s, self._waited_in_line_s = self._waited_in_line_s, CORES.in_line_s()
        return max(0.0, self._waited_in_line_s - before_s)

    def _fell_back(self) -> bool:
        """Return whether the step ran unchanged although an arm should change it."""
        arm = self.arm_under_way
        fell_back = self.loaders.fell_back or (arm is not None and (arm.fell_back or arm.refusal is not None))
        if arm is not None:
            arm.fell_back = False
        return fell_back

    def _find_device(self) -> None:
        """Find the GPU by the optimizer's parameters during warm-up; time transfers from then on."""
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
            self.marks = self.clock.marks = DeviceMarks()
            install_transfers(self, self.patches)

    def _advance(self) -> None:
        row = self.rows[-1]
        if self.warm_up is not None:
            self.position = 1
            ready = self.warm_up.add(row.host_s) or self._is_late(len(self.warm_up.steps_s) >= FEWEST_WARM_UP)
            plan = self.agreement.plan(row.index, ready, self._plan)
            if plan is not None:
                self.warmup_reason = self.warm_up.reason or "as rank 0 decided"
                self.settle()
                self.warm_up, self.position = None, 0
                self.sequence.begin(plan)
                if self.agreement.shared:
                    self.sequence.propose_for_ranks()
                    with self.tools.guard("network"):
                        self.tools.network = measure_network(self.device, group_store())
                self.listener.block_ended()
                self._begin_block(self.arm)
            return
        self.tools.step_end()
        arm = self.arm_under_way
        if arm is not None:
            arm.step_end()
        self.position += 1
        shared = self.agreement.shared
        late = self._is_late(self.sequence.has_run_real and not shared)
        refused = arm is not None and arm.refusal is not None and not shared
        if self.position < self.sequence.block.num_steps and not late and not refused:
            return
        self._end_block(self.arm)
        if self.arm == "count" and not (late or shared or self._are_all_usual()):
            self.sequence.count_again()
        self.sequence.number += 1
        self.position = 0
        self.listener.block_ended()
        if not shared:
            self.sequence.drop_passes()
        if self.sequence.is_over and not late:
            self.sequence.blocks += self.sequence.next_blocks(self.num_steps) or self._until_training()
        if self.sequence.is_over or late:
            self._is_late(not shared)
            self.sequence.leave_out_later()
            self.finished = True
            self.listener.finished()
        else:
            self._begin_block(self.arm)

    @property
    def num_steps(self) -> int:
        """How many steps of the job have ended."""
        return self.anchor.counts[self.anchor.current] if self.anchor.current is not None else 0

    @property
    def seconds_left(self) -> float:
        return self.deadline.seconds_left

    def _is_late(self, enough: bool) -> bool:
        """Return whether the time is up, once `enough` is measured to say something."""
        if enough and self.seconds_left <= 0:
            self.out_of_time = True
            return True
        return False

    @property
    def due_s(self) -> float:
        """Return when the step under way is overdue on the monotonic clock: an evaluation, or one that hangs.

        Ranks wait for the end of the step, because they must all do the same.
        """
        if self.agreement.shared:
            return math.inf
        steps_s = (row.host_s for row in self.rows)
        return self.deadline.due_s(
            steps_s, step_began_s=self._step_began_s, trains_elsewhere=self.other_trainers.trains
        )

    @property
    def is_overdue(self) -> bool:
        """Return whether the time has been up for a while and a step still runs."""
        return not self.finished and not self.removed and time.monotonic() > self.due_s

    def _look_at_time(self) -> None:
        if self.is_overdue:
            self.listener.overdue()
        elif not self.finished and not self.removed:
            self._announce()

    def _announce(self) -> None:
        due_s = self.due_s
        if self.deadline.is_news(due_s):
            self.listener.due(due_s - time.monotonic())

    def cut_short(self) -> None:
        """Finish inside the step under way, and note which line holds it."""
        self.finished = self.out_of_time = True
        self._ends = None
        set_up = self.deadline.first_step_s is None
        took_s = time.monotonic() - self.deadline.began_s if set_up else now() - self._step_began_s
        looks = [each for each in self.stack_watch.looks if each.time_s > self._step_began_s and each.places]
        lines = heaviest(looks)[0][:MOST_SHOWN] if looks else ()
        held = f", most of it at {', in '.join(map(str, lines))}" if lines else ""
        if not self.rows and not set_up:
            first_s = self.deadline.set_up_s
            held += f"; the first one ended after {show_seconds(first_s)}, imports included, and "
            most_s = math.ceil(FEWEST_FOR_ARMS * first_s)
            held += f"{FEWEST_FOR_ARMS} such steps need at most --seconds {most_s}"
        self.tools.missing.append(f"{UNFINISHED}: it had not ended after {show_seconds(took_s)}{held}")
        self.sequence.leave_out_later()
        if self.rows:
            self._note_row(self.clock.take(), [], unfinished=True)

    def settle(self) -> None:
        """Stop watching for anchors and outermost modules: warm-up has shown them."""
        self.anchor.freeze()
        narrow_modules(self, self._narrowed)

    def _plan(self) -> list[StepBlock]:
        """Return the blocks known in advance, by the pace of the last steps of warm-up."""
        assert self.warm_up is not None
        if not self.warm_up.reason:
            self.warm_up.reason = f"the time was up after {len(self.warm_up.steps_s)} steps"
        return self.sequence.plan(self.warm_up.step_s, device=self.device)

    def _until_training(self) -> list[StepBlock]:
        """Return more steps if they are model calls with gradients: games, say, before the first backward."""
        import torch

        is_call = self.anchor.current is not None and self.anchor.current[0] == MODEL_CALL
        if not is_call or not torch.is_grad_enabled() or self.agreement.shared:
            return []
        return [StepBlock(arm=REAL, num_steps=max(1, math.ceil(WAIT_S / real_step_s(self.rows))))]

    def _context(self) -> ArmContext:
        tools = self.tools
        timed = real_rows(self.rows)
        totals = [sum(values) / len(timed) for values in zip(*(row.totals for row in timed), strict=True)]
        return ArmContext(
            device=self.device,
            step_s=real_step_s(self.rows),
            phases_s=phases_s(totals),
            stacks=tools.stacks,
            sites=tools.found_sites(),
            module_calls=tools.found_calls(self.optimizers),
            kernels=tools.kernels,
            memory=tools.memory,
            loaders=self.loaders,
            optimizer=self.optimizer,
            optimizers=tuple(self.optimizers),
            made_at=self.made_at.get,
            attributed_step_s=tools.attributed_step_s,
            user_code=self.user_code,
            clock=self.clock,
            patches=self.patches,
            left_out=self.left_out,
            num_backwards=lambda: self.num_backwards,
            outermost_types=frozenset(self.outermost_types),
            seconds_left=self.seconds_left,
            batch_statements=self.batch_statements,
            process=self.process,
        )

    # -- blocks

    def _begin_block(self, label: str) -> None:
        num_steps = self.sequence.block.num_steps
        self.listener.progress(f"{label}: {num_steps} steps, {max(0.0, self.seconds_left):.0f} s left")
        arm = self.sequence.arms.get(label)
        with self.tools.guard("training"):
            self.process.training.block_begins(of_arm=arm is not None and not arm.is_internal)
        self.loaders.begin_serving(arm.serves if arm is not None else None)
        self.loaders.recording = label == REAL
        self._ends = [] if label == UNWATCHED else None
        self.loaders.counts_rows = label == REAL or (arm is not None and arm.serves is None)
        self.loaders.counts_rows &= self._ends is None
        if arm is not None:
            self._begin_arm(arm)
        self.tools.begin(label, self.device)

    def _begin_arm(self, arm: Arm) -> None:
        self.num_arms += not arm.is_internal
        try:
            arm.begin()
        except Exception as error:  # noqa: BLE001 - ours; the steps run as they are and do not count
            arm.refusal = f"it could not start: {type(error).__name__}: {error}"

        def late() -> None:
            arm.refusal = "its steps did not end, so the rest ran unchanged"
            arm.release()

        self.watchdog.watch(
            longest_s=self._longest_s(), on_late=late, on_stuck=lambda: self.listener.stuck(arm)
        )

    def _longest_s(self) -> float:
        """Return the seconds after which a block of an arm counts as hanging."""
        steps_s = [row.host_s for row in self.rows if row.arm == REAL]
        block_s = sum(steps_s) / max(1, len(steps_s)) * self.sequence.block.num_steps
        return max(HANGS_S, HANGS * block_s)

    def _end_block(self, label: str) -> None:
        self._ends = None
        self.end_arm()
        steps_s = [row.host_s for row in self._rows_of_block()]
        self.tools.end(label, steps_s, usual_steps=self._usual_steps())

    def _rows_of_block(self) -> list[StepRow]:
        return [row for row in self.rows if row.block == self.sequence.number and row.arm == self.arm]

    def _usual_steps(self) -> list[int]:
        """Return the numbers of this block's steps that hold only what a usual step holds."""
        rows = self._rows_of_block()
        most_call = usual_forwards([row for row in self.rows if row.arm in ("warmup", REAL)])
        usual = typical_steps([row.host_s for row in rows])
        return [number for number in usual if most_call is None or rows[number].num_forwards <= most_call]

    def _are_all_usual(self) -> bool:
        return len(self._usual_steps()) == len(self._rows_of_block())

    def end_arm(self) -> None:
        """Run steps unchanged again."""
        arm = self.sequence.arms.get(self.arm)
        self.watchdog.end()
        if arm is not None:
            with self.tools.guard(arm.label):
                arm.end()


def _leave_in_child(observer: Observer | None) -> None:
    """Remove the observer from a forked process (a worker, an environment, another trainer)."""
    if observer is not None and not observer.removed:
        observer.tools.leave_in_child()
        arm = observer.arm_under_way
        if arm is not None:
            arm.release()
        observer.removed = True
        observer.patches.undo()
        observer.other_trainers.watch()
