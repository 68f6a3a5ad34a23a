"""What a trial observes of its job: step times, losses, and what a few steps compute.

A step ends with an optimizer's step, of several optimizers the least frequent.  Steps are timed in blocks:
the host waits for a GPU only between two blocks, so that a step gets no extra work.  A loss is the tensor
whose `backward` is called.  At the steps to be compared, gradients and parameters are hashed, parameter by
parameter; such steps are never timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from gc import get_freeze_count, unfreeze
from pathlib import Path
from typing import Any, NoReturn

from flatout.ground.codec import encode
from flatout.measure.patches import Patches
from flatout.measure.run.steps import OPTIMIZER_STEP, Anchor
from flatout.tuner.child import TrialOptions
from flatout.tuner.first_call import on_first_call
from flatout.tuner.step_hooks import around_steps
from flatout.tuner.treatments.updates.merged_groups import parameters_of
from flatout.tuner.trial import variants
from flatout.tuner.trial.counts import Counter, Counts
from flatout.tuner.trial.hashes import hash_of
from flatout.tuner.trial.other_weights import all_modules, find_weights, norms_of
from flatout.tuner.trial.reads import Reads
from flatout.tuner.trial.switched import ArmResult, Blocks
from flatout.tuner.trial.turns import wait_for_turn

MOST_LOSSES = 20_000
LEAST_BLOCK_S = 0.1  # a treatment may make steps so short that a block of them shows nothing


class EndOfTrial(BaseException):
    """Ends the script; not an Exception, so ordinary handlers let it through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHashes:
    """Hashes of what one step computed, parameter by parameter."""

    gradients: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # after the step


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """What a trial observed."""

    ended: str  # "measured", "finished" before it was measured, "crashed", "killed"
    error: str | None = None
    blocks_s: tuple[float, ...] = ()  # seconds of a step, block by block
    arms: tuple[ArmResult, ...] = ()  # of switched treatments
    before_s: float | None = None  # from the start of the process to the first block
    num_steps_before: int = 0
    losses: tuple[float, ...] = ()  # in order; several per step under accumulation
    num_losses_at_start: int = 0  # of the first block
    checked: dict[str, StepHashes] = field(default_factory=dict)  # by step
    batches: dict[str, str] = field(default_factory=dict)  # hashes by "loader.batch"
    start: str | None = None  # a hash of the weights before the first step, in 32 bits
    reads: tuple[float, ...] = ()  # numbers that the script read from tensors
    num_steps: int = 0
    num_skipped: int = 0  # steps that a gradient scaler skipped, or that had no gradient
    trained: int = 0  # parameters with a gradient at the first step
    still: int = 0  # of these, unchanged by the first step
    still_at_end: int = 0  # of these, equal at the last step to before the first
    others: tuple[float, ...] = ()  # norms of the weights that no optimizer changes, at the last step
    formats: tuple[str, ...] = ()  # of the parameters
    draws: bool = True  # random numbers on the device, from step to step; true if that is not known
    peak_bytes: int | None = None
    counts: Counts | None = None
    starts_plainly: bool = False  # the script had not changed its environment when torch was imported


class Meter:
    """Counts the steps of the job in this process, and ends it."""

    def __init__(self, options: TrialOptions, patches: Patches) -> None:
        self.options, self.patches = options, patches
        self.num_steps = 0
        self.is_done = False
        self._began_s = self._started_s = time.perf_counter()
        self._environment = dict(os.environ)
        self._starts_plainly = False
        self._before_s: float | None = None
        self._num_before = self._block_began = 0  # steps
        self._blocks_s: list[float] = []
        self._switched: Blocks | None = None
        self._checked: dict[str, StepHashes] = {}
        self._reads = Reads(options.checked, all_batches=options.all_batches)
        self._losses: list[Any] = []
        self._num_losses_at_start = 0
        self._weights: list[tuple[Any, Any]] = []  # in the first step: parameters, and their values before
        self._hashes: list[tuple[Any, str]] = []  # after it: those with a gradient, and their earlier hashes
        self._modules: Collection[Any] = ()  # that were there before the script
        self._num_frozen = 0  # objects, likewise
        self._own: set[int] = set()  # ids of the optimizers' parameters
        self._others: list[Any] = []  # weights of modules that no optimizer changes
        self._start: str | None = None
        self._trained = self._still = self._still_at_end = 0
        self._formats: tuple[str, ...] = ()
        self._random: Any = None  # the state of the GPU's generator after the first step
        self._num_empty = 0  # steps of optimizers without any gradient
        self._anchor = Anchor()
        self._torch: Any = None
        self._counter: Counter | None = None
        self._counts: Counts | None = None

    def run(self, script: Callable[[], None]) -> NoReturn:
        """Run the script until enough is known, write the result, and exit."""
        error: str | None = None
        try:
            script()
            ended = "finished"
        except EndOfTrial:
            ended = "measured"
        except BaseException as raised:  # noqa: BLE001 - the script's own
            ended = "crashed"
            error = traceback.format_exception_only(raised)[-1].strip().partition("\n")[0]
            if isinstance(raised, SystemExit) and not raised.code:
                ended, error = "finished", None
        result = self.result("measured" if self.is_done else ended, error)
        Path(self.options.result).write_text(json.dumps(encode(result)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # do not wait for threads and workers of a script that was cut off

    def prepare(self) -> None:
        """Prepare before the treatments are installed: record what they change."""
        import torch

        self._torch = torch
        self._starts_plainly = dict(os.environ) == self._environment
        unfreeze()  # frozen modules are not listed
        self._modules = all_modules()
        variants.seed_all(torch, self.patches, self.options.seed)

    def install(self) -> None:
        """Install outside the treatments: what the script itself sees is what counts."""
        torch, options = self._torch, self.options
        self._num_frozen = get_freeze_count()
        if options.arms:
            self._switched = Blocks(options.arms, self.patches, seconds=options.seconds)
        self._install_losses(torch)
        self._reads.install(torch, self.patches)
        if options.plain:
            variants.switch_dropout_off(torch, self.patches)
        if options.fixed_samples:
            variants.fix_samples(torch, self.patches)
        if options.same_random:
            variants.draw_as_eager_does()
        if options.double:
            variants.compute_in_64_bits(torch, self.patches)
        if options.nudge or options.double:
            change = variants.widen if options.double else (lambda inputs: inputs)
            on_first_call(self.patches, self._change_model, change=change)
        around_steps(self.patches, before=self._before_step, after=self._after_step)

    def _install_losses(self, torch: Any) -> None:
        real, known_to_numpy = torch.autograd.backward, (torch.float32, torch.float64)

        def keep(root: Any) -> Any:
            if type(root) is torch.Tensor and root.device.type == "cpu" and root.dtype in known_to_numpy:
                return root.detach().numpy().item()  # a read by torch would count as the job's own
            return root.detach().clone()  # a CUDA graph writes the next loss to the same place

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            if len(self._losses) < MOST_LOSSES:
                self._losses += [keep(root) for root in roots if root.numel() == 1]
            return real(tensors, *args, **kwargs)

        self.patches.replace(torch.autograd, "backward", backward)

    def _change_model(self, module: Any) -> None:
        with self._torch.no_grad():
            if self.options.double:
                module.double()
                usual = self._torch.get_default_dtype()
                self.patches.on_undo(lambda: self._torch.set_default_dtype(usual))
                self._torch.set_default_dtype(self._torch.float64)  # masks and zeros that a forward makes
            if self.options.nudge:
                for parameter in module.parameters():
                    if parameter.is_floating_point():
                        variants.nudge(self._torch, parameter)

    # -- steps

    def _before_step(self, optimizer: Any) -> None:
        if self._counter is not None:
            self._counter.groups[id(optimizer)] = len(optimizer.param_groups)
        if self.num_steps == 0:
            known = {id(parameter) for parameter, _ in self._weights}
            self._weights += [
                (each, each.detach().clone()) for each in parameters_of(optimizer) if id(each) not in known
            ]

    def _after_step(self, optimizer: Any) -> None:
        if self.is_done:  # the script swallowed the end
            raise EndOfTrial
        step = self.num_steps + 1
        self._num_empty += not _has_gradient(optimizer)
        if step in self.options.checked:
            self._check(str(step), optimizer)
        if not self._anchor.add((OPTIMIZER_STEP, id(optimizer)), type(optimizer).__name__):
            return
        self.num_steps = step
        if step == 1:
            self._look_at_first_step()
            if self.options.turn is not None:
                self._wait()
                self._began_s += wait_for_turn(self.options.turn)
        self._measure(step)
        if self.is_done:
            raise EndOfTrial

    def _measure(self, step: int) -> None:
        """Act by step number: warm-up, blocks, and one more step to compare."""
        options = self.options
        if self._switched is not None:
            self._measure_switched(step, self._switched)
            return
        if len(self._blocks_s) >= options.blocks:
            self._still_at_end = sum(hash_of(now) == before for now, before in self._hashes)
            self._others = find_weights(before=self._modules, own=self._own, num_frozen=self._num_frozen)
            self.is_done = True
        elif step == options.warmup:
            self._wait()
            self._begin_blocks(time.perf_counter(), step)
            if options.counts:
                self._counter = Counter(cuda=self._torch.cuda.is_initialized())
                self._counter.start()
            self._block_began, self._started_s = step, time.perf_counter()
        elif step > options.warmup and self._ends_block(num_steps := step - self._block_began):
            self._wait()
            self._blocks_s.append((time.perf_counter() - self._started_s) / num_steps)
            if self._counter is not None and self._counts is None:
                self._counts = self._counter.stop(num_steps)
            self._block_began, self._started_s = step, time.perf_counter()

    def _ends_block(self, num_steps: int) -> bool:
        block_steps = self.options.block_steps
        may_grow = num_steps + block_steps <= self.options.most_block_steps
        return num_steps % block_steps == 0 and not (
            may_grow and time.perf_counter() - self._started_s < LEAST_BLOCK_S
        )

    def _measure_switched(self, step: int, blocks: Blocks) -> None:
        half = max(1, self.options.warmup // 2)
        if step == half:
            self._wait()
            self._started_s = time.perf_counter()
        elif step == half + self.options.warmup:
            self._wait()
            now_s = time.perf_counter()
            self._begin_blocks(now_s, step)
            step_s = (now_s - self._started_s) / self.options.warmup
            self.is_done = not blocks.begin(self._torch, step_s=step_s)
        elif step > half + self.options.warmup:
            self.is_done = not blocks.step_end()

    def _begin_blocks(self, now_s: float, step: int) -> None:
        self._before_s, self._num_before = now_s - self._began_s, step
        self._num_losses_at_start = len(self._losses)

    def _wait(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.current_stream().synchronize()

    # -- what is compared

    def _check(self, step: str, optimizer: Any) -> None:
        found = self._checked.get(step, StepHashes())
        parameters = parameters_of(optimizer)
        self._checked[step] = StepHashes(
            gradients=(
                *found.gradients,
                *(hash_of(each.grad) for each in parameters if each.grad is not None),
            ),
            parameters=(*found.parameters, *(hash_of(each) for each in parameters)),
        )

    def _look_at_first_step(self) -> None:
        """Record the weights before the first step, and what it changed."""
        torch = self._torch
        trained = [(now, before) for now, before in self._weights if now.grad is not None]
        self._trained = len(trained)
        self._still = sum(_equal(now, before) for now, before in trained)
        self._formats = tuple(str(now.dtype).removeprefix("torch.") for now, _ in self._weights)
        self._start = " ".join(
            hash_of(before.to(torch.float32) if before.is_floating_point() else before)
            for _, before in self._weights
        )
        if self.options.first_step is not None:
            self._save_first_step(trained, self.options.first_step)
            self.is_done = True
        self._hashes = [(now, hash_of(before)) for now, before in trained]
        self._own = {id(now) for now, _ in self._weights}
        self._weights = []  # the job must not carry a second copy of the model
        if torch.cuda.is_initialized():
            self._random = torch.cuda.get_rng_state()

    def _save_first_step(self, trained: list[tuple[Any, Any]], path: str) -> None:
        """Save each parameter's gradient and change, in 64 bits."""
        from safetensors.torch import save_file

        kept = {}
        for number, (now, before) in enumerate(trained):
            if not now.grad.is_sparse:
                kept[f"gradient.{number}"] = now.grad.detach().to("cpu", self._torch.float64).contiguous()
                kept[f"change.{number}"] = (now.double() - before.double()).detach().cpu().contiguous()
        save_file(kept, path)

    def result(self, ended: str, error: str | None = None) -> TrialResult:
        """Return what was observed, with the job restored."""
        self.patches.undo()
        on_gpu = self._torch is not None and self._torch.cuda.is_initialized()
        if self._random is not None:
            draws = not self._torch.equal(self._torch.cuda.get_rng_state(), self._random)
        else:
            draws = True
        return TrialResult(
            ended=ended,
            error=error,
            blocks_s=tuple(self._blocks_s),
            arms=self._switched.results() if self._switched is not None and self._before_s else (),
            before_s=self._before_s,
            num_steps_before=self._num_before,
            losses=tuple(float(each) for each in self._losses),
            num_losses_at_start=self._num_losses_at_start,
            checked=self._checked,
            batches=self._reads.batches,
            start=self._start,
            reads=tuple(self._reads.scalars),
            num_steps=self.num_steps,
            num_skipped=self._reads.num_skipped + self._num_empty,
            trained=self._trained,
            still=self._still,
            still_at_end=self._still_at_end,
            others=norms_of(self._others),
            formats=self._formats,
            draws=draws,
            counts=self._counts,
            starts_plainly=self._starts_plainly,
            peak_bytes=self._torch.cuda.max_memory_allocated() if on_gpu else None,
        )


def _has_gradient(optimizer: Any) -> bool:
    """Return whether a parameter has one; called in timed steps, so it ends at the first."""
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def _equal(now: Any, before: Any) -> bool:
    import torch

    return now.dtype == before.dtype and bool(torch.equal(now.detach(), before))
