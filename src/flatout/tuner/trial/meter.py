"""What a trial sees of its job: how long steps take, the losses, and the gradients of a few steps.

A step ends with an optimizer's step, of several optimizers the least frequent.  Steps are timed in blocks:
on a GPU the host waits for it only between two blocks, so that nothing is added to a step.  A loss is the
tensor whose `backward` is called.  Gradients are summed in 64 bits, parameter by parameter, at the steps that
are to be compared; equal sums of all parameters, and equal losses at every step, are equal numbers.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from flatout.ground.codec import encode
from flatout.measure.patches import Patches
from flatout.measure.run.steps import OPTIMIZER_STEP, Anchor
from flatout.tuner.child import TrialOptions
from flatout.tuner.outermost import Inputs, on_first_call
from flatout.tuner.trial.counts import Counter, Counts

MOST_LOSSES = 20_000


class EndOfTrial(BaseException):
    """Ends the script; not an Exception, so ordinary handlers let it through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """What a trial saw."""

    ended: str  # "measured", "finished" before it was measured, "crashed", "killed"
    error: str | None = None
    blocks_s: tuple[float, ...] = ()  # seconds of a step, block by block
    losses: tuple[float, ...] = ()  # in order; several per step under accumulation
    num_losses_at_start: int = 0  # of the first block
    sums: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)  # of gradients, by step
    num_steps: int = 0
    still: int = 0  # parameters with a gradient that the first step did not change
    peak_bytes: int | None = None
    counts: Counts | None = None


class Meter:
    """Counts the steps of the job in this process, and ends it."""

    def __init__(self, options: TrialOptions, patches: Patches) -> None:
        self.options, self.patches = options, patches
        self.num_steps = 0
        self._blocks_s: list[float] = []
        self._sums: dict[str, tuple[tuple[str, ...], ...]] = {}
        self._losses: list[Any] = []
        self._num_losses_at_start = 0
        # at the first step: parameters, what they were before it, and their gradients
        self._first: list[tuple[Any, Any, Any]] = []
        self._still = 0
        self._anchor = Anchor()
        self._started_s = 0.0
        self._torch: Any = None
        self._counter: Counter | None = None
        self._counts: Counts | None = None

    def run(self, script: Callable[[], None]) -> NoReturn:
        """Run the script until enough is known, write what was seen, and leave."""
        error: str | None = None
        try:
            script()
            ended = "finished"
        except EndOfTrial:
            ended = "measured"
        except BaseException as raised:  # noqa: BLE001 - the script's own
            ended = "crashed"
            error = traceback.format_exception_only(raised)[-1].strip()
            if isinstance(raised, SystemExit) and not raised.code:
                ended, error = "finished", None
        self._write("measured" if self.is_done else ended, error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # threads and workers of a script that was cut off need not be waited for

    @property
    def is_done(self) -> bool:
        return len(self._blocks_s) >= self.options.blocks

    def install(self) -> None:
        import torch
        from torch.optim import optimizer as optimizers

        self._torch = torch
        self._install_losses(torch)
        if self.options.plain:
            _switch_dropout_off(torch, self.patches)
        if self.options.same_random:
            _draw_as_eager_does()
        if self.options.seed:
            _shift_seeds(torch, self.patches, self.options.seed)
        if self.options.nudge or self.options.double:
            change = _widen if self.options.double else (lambda inputs: inputs)
            on_first_call(self.patches, self._change_model, change=change)
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)

    def _install_losses(self, torch: Any) -> None:
        real = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if len(self._losses) < MOST_LOSSES:
                self._losses += [root.detach().clone() for root in roots if root.numel() == 1]
            return real(tensors, *args, **kwargs)

        self.patches.replace(torch.autograd, "backward", backward)

    def _change_model(self, module: Any) -> None:
        with self._torch.no_grad():
            if self.options.double:
                module.double()
                self._torch.set_default_dtype(self._torch.float64)  # masks and zeros that a forward makes
            if self.options.nudge:
                for parameter in module.parameters():
                    if parameter.is_floating_point():
                        self._nudge(parameter)

    def _nudge(self, parameter: Any) -> None:
        """Move every second element by one unit in the last place."""
        moved = parameter.detach().clone().view(-1)
        moved[::2] = self._torch.nextafter(moved[::2], moved[::2] * 2)
        parameter.copy_(moved.view_as(parameter))

    # -- steps

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        step = self.num_steps + 1
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [each for each in parameters if each.grad is not None]
        if step in self.options.checked:
            self._sums[str(step)] = (*self._sums.get(str(step), ()), *(_sums(each.grad) for each in trained))
        if self._counter is not None:
            self._counter.groups[id(optimizer)] = len(optimizer.param_groups)
        if step == 1:
            self._first += [(each, each.detach().clone(), each.grad.detach().clone()) for each in trained]

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self.is_done:  # the script swallowed the end
            raise EndOfTrial
        if not self._anchor.add((OPTIMIZER_STEP, id(optimizer)), type(optimizer).__name__):
            return
        self.num_steps += 1
        if self.num_steps == 1:
            self._still = sum(bool(self._torch.equal(now, before)) for now, before, _ in self._first)
            if self.options.first_step is not None:
                self._save_first_step(self.options.first_step)
        into_blocks = self.num_steps - self.options.warmup
        if into_blocks < 0 or into_blocks % self.options.block_steps:
            return
        self._wait()
        if into_blocks:
            self._blocks_s.append((time.perf_counter() - self._started_s) / self.options.block_steps)
            if self._counter is not None and self._counts is None:
                self._counts = self._counter.stop(self.options.block_steps)
        else:
            self._num_losses_at_start = len(self._losses)
            if self.options.counts:
                self._counter = Counter(cuda=self._torch.cuda.is_initialized())
                self._counter.start()
        if self.is_done:
            raise EndOfTrial
        self._started_s = time.perf_counter()

    def _wait(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.current_stream().synchronize()

    def _save_first_step(self, path: str) -> None:
        """Keep each parameter's gradient and change, in 64 bits."""
        from safetensors.torch import save_file

        kept = {}
        for number, (now, before, gradient) in enumerate(self._first):
            if not gradient.is_sparse:
                kept[f"gradient.{number}"] = gradient.to("cpu", self._torch.float64).contiguous()
                kept[f"change.{number}"] = (now.double() - before.double()).detach().cpu().contiguous()
        save_file(kept, path)

    def _write(self, ended: str, error: str | None) -> None:
        self.patches.undo()  # what is written from here on is ours
        on_gpu = self._torch is not None and self._torch.cuda.is_initialized()
        result = TrialResult(
            ended=ended,
            error=error,
            blocks_s=tuple(self._blocks_s),
            losses=tuple(float(each) for each in self._losses),
            num_losses_at_start=self._num_losses_at_start,
            sums=self._sums,
            num_steps=self.num_steps,
            still=self._still,
            counts=self._counts,
            peak_bytes=self._torch.cuda.max_memory_allocated() if on_gpu else None,
        )
        Path(self.options.result).write_text(json.dumps(encode(result)))


def _sums(gradient: Any) -> tuple[str, ...]:
    """Two sums of a gradient and its shape, as hexadecimal floats: equal gradients have equal ones."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    wide = gradient.detach().double()
    weights = _weights(wide)
    return float(wide.sum()).hex(), float((wide * weights).sum()).hex(), str(tuple(gradient.shape))


def _weights(values: Any) -> Any:
    """1, 2, 3 … along all elements, so that two exchanged elements change the sum."""
    import torch

    return torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device).view(values.shape)


def _widen(inputs: Inputs) -> Inputs:
    """The same inputs in 64 bits."""
    from flatout.measure.batches import map_arrays

    def widen(array: Any) -> Any:
        return array.double() if getattr(array, "is_floating_point", lambda: False)() else array

    args, kwargs = inputs
    return tuple(map_arrays(list(args), widen)), map_arrays(kwargs, widen)


def _switch_dropout_off(torch: Any, patches: Patches) -> None:
    """Random masks of one format are not those of another: gradients are compared without them."""
    functional = torch.nn.functional
    for name in ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"):
        patches.replace(functional, name, _without_chance(getattr(functional, name)))
    real = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kw: Any
    ) -> Any:
        return real(query, key, value, attn_mask, 0.0, *args, **kw)

    patches.replace(functional, "scaled_dot_product_attention", attention)


def _draw_as_eager_does() -> None:
    """Compiled code has a generator of its own; losses can be compared only where both draw alike."""
    from torch._inductor import config

    config.fallback_random = True


def _without_chance(real: Callable[..., Any]) -> Callable[..., Any]:
    def same(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return real(x, 0.0, training, inplace)

    return same


def _shift_seeds(torch: Any, patches: Patches, by: int) -> None:
    import random

    real = torch.manual_seed

    def manual_seed(seed: int) -> Any:
        return real(int(seed) + by)

    patches.replace(torch, "manual_seed", manual_seed)
    real_random = random.seed
    patches.replace(
        random, "seed", lambda a=None, version=2: real_random(a + by if isinstance(a, int) else a, version)
    )
    manual_seed(0)
