"""Births and deaths of every storage of a training step, on tensors without data.

The step runs under PyTorch's fake tensors: shapes and dtypes are computed, memory is not taken, so a 7B
model traces on a laptop.  Fake tensors live on the CPU, and `cuda_rules` makes the CPU choose as CUDA would;
the trace therefore belongs into a process of its own (`child`).  On a machine with a GPU the same trace can
run on fake CUDA tensors (`device="cuda"`), where PyTorch chooses by itself.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from flatout.memory import dynamic_sizes, shadows
from flatout.memory.job import Job, Recipe, Sizes
from flatout.memory.step import make_parts, run_step
from flatout.memory.trace import Component, Guess, Phase, Storage, Trace
from flatout.memory.workspaces import Workspaces

aten = torch.ops.aten
PRIM_DEVICE = torch.ops.prim.device.default
SCALAR = aten._local_scalar_dense.default
TO_COPY = aten._to_copy.default


class _Born:
    """A storage under way: what is known of it so far."""

    __slots__ = ("component", "module", "num_bytes", "op", "phase")

    def __init__(self, num_bytes: int, op: str, phase: Phase, module: str | None) -> None:
        self.num_bytes, self.op, self.phase, self.module = num_bytes, op, phase, module
        self.component: Component | None = None


class Tracer(TorchDispatchMode):
    """Logs births and deaths while it is active; must be entered inside a FakeTensorMode."""

    def __init__(self, *, device: str, workspaces: Workspaces) -> None:
        super().__init__()
        self.device = device
        self.workspaces = workspaces
        self.born: list[_Born] = []
        self.events: list[int] = []
        self.phase: Phase = "setup"
        self.modules: list[str] = []
        self.guesses: dict[Guess, None] = {}
        self.attention: Counter[str] = Counter()
        self._alive: dict[int, tuple[int, Any]] = {}  # storage -> (number, weak reference)

    # -- storages

    def track(self, tensor: Tensor, op: str, component: Component | None = None) -> int | None:
        """Note the storage of `tensor`, if it is not known; its number, or None if it has no bytes."""
        if tensor.device.type != self.device:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None:
            if component is not None:
                self.born[known[0]].component = component
            return known[0]
        num_bytes = storage.nbytes()
        if num_bytes == 0:
            return None
        number = self._birth(num_bytes, op, component)
        log, alive = self.events, self._alive

        def dead(_: object) -> None:
            if alive.pop(key, None) is not None:
                log.append(~number)

        self._alive[key] = (number, weakref.ref(storage, dead))
        return number

    def _birth(self, num_bytes: int, op: str, component: Component | None) -> int:
        number = len(self.born)
        born = _Born(num_bytes, op, self.phase, self.modules[-1] if self.modules else None)
        born.component = component
        self.born.append(born)
        self.events.append(number)
        return number

    def forget(self, tensor: Tensor) -> int | None:
        """Take a storage out of the log again: it is the host's, not the device's."""
        known = self._alive.pop(tensor.untyped_storage()._cdata, None)
        return None if known is None else known[0]

    def guess(self, op: str, answer: str) -> None:
        self.guesses[Guess(op=op, module=self.modules[-1] if self.modules else None, answer=answer)] = None

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is PRIM_DEVICE:
            return func(*args, **kwargs)
        if func is SCALAR:
            return self._scalar(args[0])
        if dynamic_sizes.depends_on_values(func, args):
            out = dynamic_sizes.run(func, args, kwargs, guess=self.guess)
        else:
            out = func(*args, **kwargs)
            shadows.follow(func, args, kwargs, out, guess=self.guess)
        name = str(func)
        component: Component | None = None
        if func is TO_COPY and isinstance(args[0], nn.Parameter) and torch.is_autocast_enabled(self.device):
            component = "autocast copies"
        elif "attention" in name:
            self.attention[name.removeprefix("aten.").partition(".")[0]] += 1
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor):
                self.track(leaf, name, component)
            elif isinstance(leaf, (tuple, list)):
                for inner in tree_iter(leaf):
                    if isinstance(inner, Tensor):
                        self.track(inner, name, component)
        temporary = [
            self._birth(num_bytes, f"workspace of {name}", "workspaces")
            for num_bytes in self.workspaces.of(func, args, kwargs)
        ]
        self.events.extend(~number for number in reversed(temporary))
        return out

    def _scalar(self, tensor: Tensor) -> Any:
        """`.item()` and `bool(...)`: the real value of integers, a guess for floating point."""
        value = shadows.value_of(tensor)
        if value is not None and not isinstance(value, FakeTensor):
            with _disable_current_modes():
                return value.item()
        answer = 1.0 if tensor.dtype.is_floating_point else tensor.dtype is torch.bool or 1
        self.guess(str(SCALAR), f"the value of a {str(tensor.dtype).removeprefix('torch.')} taken as {answer}")
        return answer


def trace_job(
    job: Job,
    recipe: Recipe,
    *,
    sizes: Sizes | None = None,
    workspaces: Workspaces | None = None,
    device: str = "cpu",
) -> Trace:
    """The trace of one training step; on "cpu" with the rules of CUDA, which must be installed."""
    start_s = time.perf_counter()
    sizes = dict(sizes if sizes is not None else job.sizes)
    batch_on_host = job.make_batch(**sizes)
    gc.collect()
    marks: list[tuple[int, str, Phase]] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(device=device, workspaces=workspaces or Workspaces())
    with mode, tracer, _ModuleNames(tracer):
        parts = make_parts(job, recipe, device=device)
        for parameter in parts.model.parameters():
            tracer.track(parameter, "parameter", "parameters")
        for buffer in parts.model.buffers():
            tracer.track(buffer, "buffer", "buffers")
        batch = tree_map(lambda leaf: _faked(leaf, mode, tracer), batch_on_host)
        gc.collect()
        start = len(tracer.events)

        def mark(phase: Phase) -> None:
            if phase == "optimizer":
                _track_gradients(tracer, parts.model)
            tracer.phase = phase
            marks.append((len(tracer.events), "first", phase))

        run_step(parts, job, recipe, batch, device=device, mark=mark)
        hosted = _track_state(tracer, parts.optimizer)
        end = len(tracer.events)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in parts.model.parameters()]
    storages, events, marks = _two_steps(tracer, start=start, end=end, marks=marks, hosted=hosted)
    return Trace(
        sizes=sizes,
        storages=storages,
        events=events,
        marks=tuple(marks),
        num_parameters=sum(count for count, _ in counts),
        num_trainable=sum(count for count, trainable in counts if trainable),
        guesses=tuple(tracer.guesses),
        attention=dict(tracer.attention),
        seconds=time.perf_counter() - start_s,
    )


class _ModuleNames:
    """Keeps the dotted name of the module whose forward is running on top of `tracer.modules`."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.names: dict[int, str] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        from torch.nn.modules import module as modules

        self.handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.tracer.modules:
            self.names.update((id(child), name) for name, child in module.named_modules())
        self.tracer.modules.append(self.names.get(id(module)) or type(module).__name__)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self.tracer.modules:
            self.tracer.modules.pop()


def _faked(leaf: Any, mode: FakeTensorMode, tracer: Tracer) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = mode.from_tensor(leaf, static_shapes=True)
    if tracer.device != "cpu":
        fake = fake.to(tracer.device)
    if not leaf.dtype.is_floating_point:
        setattr(fake, shadows.VALUE, leaf)
    tracer.track(fake, "input", "inputs")
    return fake


def _track_gradients(tracer: Tracer, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            tracer.track(parameter.grad, "gradient", "gradients")


def _track_state(tracer: Tracer, optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Mark the optimizer's state; the numbers of step counters, which live on the host."""
    hosted: set[int] = set()
    for group in optimizer.param_groups if optimizer is not None else ():
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():  # type: ignore[union-attr]
                if not isinstance(value, Tensor):
                    continue
                if name == "step" and not on_device:
                    number = tracer.forget(value)
                    if number is not None:
                        hosted.add(number)
                else:
                    tracer.track(value, "optimizer state", "optimizer state")
    return hosted


def _two_steps(
    tracer: Tracer, *, start: int, end: int, marks: list[tuple[int, str, Phase]], hosted: set[int]
) -> tuple[tuple[Storage, ...], np.ndarray[Any, np.dtype[np.int64]], list[tuple[int, str, Phase]]]:
    """What is alive at the start, the traced step, and the step after it, as one log.

    The step after it is the same, but gradients left by the first are dropped at its start and the
    optimizer's state is there.
    """
    events = tracer.events[:end]
    before, step = _alive_after(events[:start]), [e for e in events[start:] if _number(e) not in hosted]
    alive = set(before)
    born_in_step = {event for event in step if event >= 0}
    died_in_step = {~event for event in step if event < 0}
    shift = {}  # index in the log of all events -> index among those kept
    kept = 0
    for index in range(start, end):
        shift[index] = kept
        kept += _number(events[index]) not in hosted
    shift[end] = kept
    components = _components(tracer, marks, events)
    state = {n for n in born_in_step if components[n] == "optimizer state"}
    lasting = born_in_step - died_in_step
    num = len(tracer.born)
    first = [*before, *step]
    dropped = [~n for n in sorted(lasting - state)]
    second = [
        (event + num if event >= 0 else ~(~event + num))
        for event in step
        if _number(event) not in state and not (event < 0 and ~event in alive)
    ]
    log = np.array([*first, *dropped, *second], dtype=np.int64)
    storages = tuple(
        Storage(
            num_bytes=born.num_bytes,
            component=components[number],
            phase=born.phase,
            op=born.op,
            module=born.module,
        )
        for number, born in enumerate(tracer.born)
    )
    used, log = np.unique(np.where(log >= 0, log, ~log), return_inverse=True), log
    numbers, inverse = used
    renumbered = np.where(log >= 0, inverse, ~inverse).astype(np.int64)
    chosen = tuple(storages[number % num] for number in numbers.tolist())
    first_marks = [(len(before) + shift[at], which, phase) for at, which, phase in marks]
    offset = len(first)
    second_marks = []
    for at, _which, phase in marks:
        position = sum(
            _number(event) not in state and not (event < 0 and ~event in alive) for event in step[: shift[at]]
        )
        second_marks.append((offset + (len(dropped) if position else 0) + position, "next", phase))
    return chosen, renumbered, [*first_marks, *second_marks]


def _number(event: int) -> int:
    return event if event >= 0 else ~event


def _alive_after(events: list[int]) -> list[int]:
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return list(alive)


def _components(tracer: Tracer, marks: list[tuple[int, str, Phase]], events: list[int]) -> list[Component]:
    """What each storage is for; one that outlives the forward that made it is an activation."""
    backward_starts = [at for at, _which, phase in marks if phase == "backward"]
    birth = {event: at for at, event in enumerate(events) if event >= 0}
    death = {~event: at for at, event in enumerate(events) if event < 0}
    result: list[Component] = []
    for number, born in enumerate(tracer.born):
        component = born.component
        if component is None:
            outlives = any(
                birth.get(number, 0) < at < death.get(number, len(events)) for at in backward_starts
            )
            component = "activations" if born.phase == "forward" and outlives else "temporaries"
        result.append(component)
    return result


Progress = Callable[[str], None]
