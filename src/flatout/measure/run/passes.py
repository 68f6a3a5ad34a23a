"""The instruments that slow a job down, each on for the few steps of its own pass.

An instrument that fails is noted in `missing` and dropped; the job continues.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

from flatout.measure import PHASES
from flatout.measure.clock import BACKWARD, OPTIMIZER, Clock
from flatout.measure.evidence import Kernels, Memory, ModuleCall, Network, Site, Stacks
from flatout.measure.lines.counted_calls import InnerModules, count_calls, count_creations
from flatout.measure.lines.function_modes import insert_mode, keep_in_backward, remove_mode
from flatout.measure.lines.module_calls import ModuleCalls
from flatout.measure.lines.stacks import StackSampler
from flatout.measure.loading.call_profile import CallProfile
from flatout.measure.loading.workers import LOG
from flatout.measure.patches import Patches, in_compiled_function
from flatout.measure.user_code import UserCode

if TYPE_CHECKING:
    from flatout.measure.device.kernels import BackwardCosts, KernelRecorder
    from flatout.measure.lines.call_sites import CallSites
    from flatout.measure.lines.live_memory import MemoryRecorder

MEETING = (BACKWARD, OPTIMIZER)  # where ranks meet in any case
WITH_MODES = ("count", "attribution", "memory")
# What passes found as Evidence takes it, by the same names.
FOUND = (
    *("attributed_step_s", "attributed_calls_s", "attributed_backward_s"),
    *("kernels", "memory", "network", "stacks"),
)


class Passes:
    """Begins and ends the passes, and holds their results."""

    def __init__(self, user_code: UserCode, clock: Clock) -> None:
        self.user_code, self.clock = user_code, clock
        self.sites: CallSites | None = None
        self.modules: ModuleCalls | None = None
        self.module_calls: ModuleCalls | None = None  # `modules` while counting
        self.inner_modules: InnerModules | None = None
        self.backward_costs: BackwardCosts | None = None
        self.kernels: Kernels | None = None
        self.memory: Memory | None = None
        self.network: Network | None = None
        self.stacks: Stacks | None = None
        self.attributed_step_s: float | None = None
        self.attributed_calls_s: dict[str, float] = {}
        self.attributed_backward_s: float | None = None
        self.missing: list[str] = []
        self._counting = False
        self._patches = Patches()
        self._kernel_recorder: KernelRecorder | None = None
        self._memory_recorder: MemoryRecorder | None = None
        self._sampler: StackSampler | None = None
        self._stance: Any = None

    def begin(self, arm: str, device: str) -> None:
        if arm in WITH_MODES and in_compiled_function():
            reason = "the step ends inside a function that torch.compile compiles"
            self.missing.append(f"{arm}: {reason}, where no mode can be installed or removed")
            return
        with self.guard(arm):
            if arm == "stacks":
                sampler = StackSampler(self.clock, self.user_code)
                sampler.start()
                self._sampler = sampler
            elif arm == "count":
                self._begin_counting()
            elif arm == "attribution":
                self._begin_attribution(device)
            elif arm == "kernels":
                from flatout.measure.device.kernels import KernelRecorder

                recorder = KernelRecorder(device)
                recorder.start()
                self._kernel_recorder = recorder
            elif arm == "memory":
                from flatout.measure.lines.live_memory import MemoryRecorder

                self._run_eagerly()
                memory_recorder = MemoryRecorder(self.user_code, device)
                memory_recorder.start()
                self._memory_recorder = memory_recorder

    def step_end(self) -> None:
        if self._sampler is not None:
            self._sampler.step_end()
        if self.sites is not None and self.sites.attributing:
            self.sites.attributed_step_end()
        if self._memory_recorder is not None:
            with self.guard("memory"):
                self._memory_recorder.step_end()

    def end(self, arm: str, steps_s: Sequence[float], *, usual_steps: Sequence[int] = ()) -> None:
        """End a pass whose steps took `steps_s` seconds each; `usual_steps` hold nothing else."""
        with self.guard(arm):
            if arm in ("count", "attribution") and self._counting:
                self._end_counting(arm, steps_s, usual_steps)
            elif arm == "kernels" and self._kernel_recorder is not None:
                recorder, self._kernel_recorder = self._kernel_recorder, None
                step_s = sum(steps_s) / max(1, len(steps_s))
                self.kernels = recorder.stop(num_steps=len(steps_s), step_s=step_s)
            elif arm == "memory" and self._memory_recorder is not None:
                memory_recorder, self._memory_recorder = self._memory_recorder, None
                self.memory = memory_recorder.stop()
            elif arm == "stacks" and self._sampler is not None:
                sampler, self._sampler = self._sampler, None
                self.stacks = sampler.stop(usual_steps=usual_steps)
                self._note_loss()
        with self.guard(arm):
            self._run_as_before()

    def leave_in_child(self) -> None:
        """Remove what a forked process inherits from the pass of the current step."""
        if self._sampler is not None:
            self._sampler.leave_in_child()
        is_attributing = self.sites is not None and self.sites.attributing
        if self._kernel_recorder is not None or is_attributing:
            from flatout.measure.device.recording import leave_in_child

            leave_in_child()
        if self._counting:
            remove_mode(self.sites)
        if self._memory_recorder is not None:
            self._memory_recorder.leave_in_worker()

    # -- what they found

    def found_sites(self) -> tuple[Site, ...]:
        if self.sites is None:
            return ()
        return self.sites.evidence(self.backward_costs.seconds_in if self.backward_costs else None)

    def found_calls(self, optimizers: Iterable[Any]) -> tuple[ModuleCall, ...]:
        return self.modules.evidence(optimizers) if self.modules is not None else ()

    def evidence(self) -> dict[str, Any]:
        """Return the rest of what the passes found, as fields of Evidence."""
        inner = self.inner_modules.evidence() if self.inner_modules is not None else ()
        operators = self.sites.operator_calls() if self.sites is not None else ()
        regions = self.sites.meeting_regions if self.sites is not None else set()
        return {
            "meets_in": tuple(PHASES[region] for region in sorted(regions) if region not in MEETING),
            "inner_calls": inner,
            "operator_calls": operators,
            **{name: getattr(self, name) for name in FOUND},
        }

    # -- counting and attribution

    def _begin_counting(self) -> None:
        from flatout.measure.lines.call_sites import CallSites

        self._run_eagerly()
        self.sites = CallSites(self.user_code, self.clock)
        self.module_calls = self.modules = ModuleCalls(self.user_code)
        self.inner_modules = InnerModules(self.user_code)
        self.inner_modules.watch(self._patches)
        LOG.profile = CallProfile(self.user_code)
        self._insert(self.sites)

    def _begin_attribution(self, device: str) -> None:
        from flatout.measure.device.kernels import BackwardCosts

        if self.sites is None:
            return
        self._run_eagerly()
        costs = BackwardCosts(device)
        costs.start()
        self.backward_costs = costs
        self.sites.attributing = True
        self._insert(self.sites)

    def _insert(self, mode: CallSites) -> None:
        keep_in_backward(mode, self._patches)
        count_calls(mode.note_call, self._patches)
        count_creations(mode.note_creation, self._patches)
        insert_mode(mode)
        self._counting = True

    def _end_counting(self, arm: str, steps_s: Sequence[float], usual_steps: Sequence[int]) -> None:
        self._counting = False
        self._patches.undo()
        self.module_calls, LOG.profile = None, None
        if not remove_mode(self.sites):
            self.missing.append(f"{arm}: the script removed the counting mode; counts may be too low")
        if self.sites is not None and self.sites.failure is not None:
            failure, self.sites.failure = self.sites.failure, None
            self.missing.append(f"{arm}: the instrument failed: {type(failure).__name__}: {failure}")
        if arm == "count" and self.sites is not None and self.modules is not None:
            self._note_loss()
            self.sites.num_steps = self.modules.num_steps = len(steps_s)
            if self.inner_modules is not None:
                self.inner_modules.num_steps = len(steps_s)
                if (broke := self.inner_modules.failure) is not None:
                    self.missing.append(f"modules inside the model: {type(broke).__name__}: {broke}")
        elif arm == "attribution" and self.sites is not None and self.backward_costs is not None:
            self.sites.attributing = False
            self.sites.forget_tensors()
            costs, self.backward_costs = self.backward_costs, None
            costs.stop()
            self.backward_costs = costs
            self._note_attribution(self.sites, costs, steps_s, usual_steps)

    def _note_loss(self) -> None:
        """Note which sampled lines contribute to the loss, whichever of the two passes comes last."""
        if self.stacks is not None and self.sites is not None:
            places = dict.fromkeys(place for path in self.stacks.paths for place in path.places)
            loss = tuple(place for place in places if place in self.sites.differentiable)
            self.stacks = dataclasses.replace(self.stacks, differentiable=loss)

    def _note_attribution(
        self, sites: CallSites, costs: BackwardCosts, steps_s: Sequence[float], usual_steps: Sequence[int]
    ) -> None:
        if not steps_s:
            return
        num = sites.attributed_steps = len(steps_s)  # the last of them may have ended with the pass
        sites.usual_steps = usual = usual_steps or range(num)
        self.attributed_step_s = mean(steps_s[step] for step in usual)
        called_s = {
            phase: mean(sites.called_s[step, region] for step in usual) for region, phase in enumerate(PHASES)
        }
        self.attributed_calls_s = {phase: seconds for phase, seconds in called_s.items() if seconds > 0}
        self.attributed_backward_s = costs.total_s / num

    # -- compiled code

    def _run_eagerly(self) -> None:
        """Turn compilation off: a mode on the stack fails guards of compiled code, which would recompile."""
        if "torch._dynamo" in sys.modules:
            import torch
            from torch._dynamo import eval_frame

            stance = eval_frame._stance.stance
            torch.compiler.set_stance("force_eager")
            self._stance = stance

    def _run_as_before(self) -> None:
        if self._stance is not None:
            import torch

            torch.compiler.set_stance(self._stance)
            self._stance = None

    @contextmanager
    def guard(self, arm: str) -> Iterator[None]:
        """Catch an instrument's failure: watching must never harm the job."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it was, it is ours and not the job's
            self.missing.append(f"{arm}: the instrument failed: {type(error).__name__}: {error}")
