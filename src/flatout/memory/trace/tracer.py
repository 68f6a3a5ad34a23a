"""Births and deaths of every storage of a training step, on tensors without data.

The step runs under PyTorch's fake tensors: shapes and dtypes are computed, memory is not taken, so a 7B
model traces on a laptop.  Fake tensors live on the CPU, and `cuda.rules` makes the CPU choose as CUDA would;
the trace therefore runs in a child process (`isolated_process`).  On a machine with a GPU the same trace runs
on fake CUDA tensors (`device="cuda"`), where PyTorch chooses by itself; `make_trace` has both ways.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
import weakref
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from flatout.ground.errors import BadInput
from flatout.memory.cuda import attention, recurrent, rules
from flatout.memory.cuda.formulas import Formula
from flatout.memory.cuda.workspaces import Group, Workspaces
from flatout.memory.jobs import eight_bit_adam
from flatout.memory.jobs.batch_without_data import make_batch
from flatout.memory.jobs.example_batch import map_tensors, refuse_nested
from flatout.memory.jobs.held_tensors import TensorPlace, held_tensors
from flatout.memory.jobs.job import Job, Recipe, Sizes, StepPhase
from flatout.memory.jobs.step import AUTOCAST, make_parts, run_step
from flatout.memory.trace import dynamic_sizes, known_values
from flatout.memory.trace.device_thread import device_thread
from flatout.memory.trace.eager import run_eagerly
from flatout.memory.trace.fake_mode import QuickFakeMode
from flatout.memory.trace.record import Component, Guess, Lean, Trace
from flatout.memory.trace.two_steps import Born, LogEvent, two_steps

aten = torch.ops.aten
PRIM_DEVICE = torch.ops.prim.device.default
SCALAR = aten._local_scalar_dense.default
COMPARISONS = {aten.equal.default, aten.allclose.default}  # whose answer is a bool, not a tensor
TO_COPY = aten._to_copy.default
DROPOUT = aten.native_dropout.default
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
LOG_SIGMOID = aten.log_sigmoid_forward.default
CONVOLUTION_WORKSPACE = "workspace of aten.convolution"
ENGINE = "_engine_run_backward"  # the last Python function before autograd's own code
BETWEEN = (__name__, "torch._compile", "torch._dynamo.eval_frame")  # this file, and what may wrap a mode
# what autograd writes in place, except for tensors without data
IN_PLACE = {
    aten.add.Tensor,
    aten.index_add.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.masked_fill.Scalar,
    aten.masked_scatter.default,
}

# what nn.TransformerEncoder does with padded rows in evaluation: computed with the padding, as dense tensors
NESTED_IN_EVALUATION = {aten._nested_tensor_from_mask.default, aten.to_padded_tensor.default}
NESTED = {aten._nested_tensor_from_tensor_list.default, aten._nested_from_padded.default}
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Tracer(TorchDispatchMode):
    """Logs births and deaths while it is active; must be entered inside a FakeTensorMode."""

    def __init__(self, *, device: str, workspaces: Workspaces, autocast: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.workspaces = workspaces
        self.autocast = autocast  # what weights are cast to: beneath autocast one cannot ask for it
        self.born: list[Born] = []
        self.events: list[LogEvent] = []
        self.phase: StepPhase = "setup"
        self.modules: list[str] = []
        self.guesses: dict[Guess, None] = {}
        self.attention: Counter[str] = Counter()
        self.sums: list[tuple[int, int]] = []  # (sum, first summand) of gradients that meet
        self._alive: dict[int, tuple[int, Any]] = {}  # storage -> (number, weak reference)

    # -- storages

    def track(self, tensor: Tensor, op: str, component: Component | None = None) -> int | None:
        """Note the storage of `tensor`, if it is not known; its number, or None if it has no bytes."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self.device:
            return None
        if tensor.layout in SPARSE:
            raise BadInput(
                f"the step makes a sparse tensor ({op}), whose size depends on values",
                hint="plan it with sparse=False and an optimizer for dense gradients, an upper bound",
            )
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
        born = Born(num_bytes, op, self.phase, self.modules[-1] if self.modules else None)
        born.component = component
        self.born.append(born)
        self.events.append(number)
        return number

    def _workspace(self, block: int | Formula, op: str) -> int:
        number = self._birth(block.num_bytes if isinstance(block, Formula) else block, op, "workspaces")
        if isinstance(block, Formula):
            self.born[number].formula = block
        return number

    def forget(self, tensor: Tensor) -> int | None:
        """Take a storage out of the log again: it is the host's, not the device's."""
        known = self._alive.pop(tensor.untyped_storage()._cdata, None)
        return None if known is None else known[0]

    def guess(self, op: str, answer: str) -> None:
        self.guesses[Guess(op=op, module=self.modules[-1] if self.modules else None, answer=answer)] = None

    # -- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs at every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is PRIM_DEVICE:  # asked twice as often as anything is computed
            return _device_of(args[0]) if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is SCALAR:
            return self._scalar(args[0])
        if func in COMPARISONS:
            return self._same(func, args, kwargs)
        if self.phase != "setup":
            for argument in args:
                if type(argument) is nn.Parameter:  # one that was made for the trace is a FakeTensor
                    _refuse_stranger(argument)
        if func in NESTED_IN_EVALUATION:
            self.guess(str(func), "every row taken as long as the longest")
            func, args, kwargs = aten.clone.default, args[:1], {}
        elif func in NESTED:
            refuse_nested()
        if dynamic_sizes.depends_on_values(func, args):
            out = dynamic_sizes.run(func, args, kwargs, guess=self.guess)
        else:
            out = func(*args, **kwargs)
            known_values.follow(func, args, kwargs, out, guess=self.guess)
        self._log(func, args, kwargs, out)
        return out

    def _log(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Log the births by one operation: its results, then its kernel's blocks, or copies before both."""
        name = str(func)
        component: Component | None = None
        is_cast = self.autocast is not None and kwargs.get("dtype") is self.autocast
        if func is TO_COPY and is_cast and isinstance(args[0], nn.Parameter):
            component = "autocast copies"
        elif "attention" in name:
            self.attention[name.removeprefix("aten.").partition(".")[0]] += 1
        before = self.workspaces.before(func, args, kwargs)
        after = list(self.workspaces.of(func, args, kwargs))
        kept_bytes = self.workspaces.kept_bytes(func, args, kwargs)
        for group in before[:-1]:
            self._hold(group, name)
        copies = [self._workspace(block, f"workspace of {name}") for group in before[-1:] for block in group]
        if func in IN_PLACE and (self._by_autograd() or attention.adds_in_place()):
            self._note_sum(func, args, out)
        made = list(reversed(out)) if func is DROPOUT else out  # the mask comes first
        for leaf in tree_iter(out[:1] if func is LOG_SIGMOID else made):  # CUDA keeps no buffer
            if isinstance(leaf, Tensor):
                number = self.track(leaf, name, component)
                if number is not None and kept_bytes is not None:
                    self.born[number].num_bytes = kept_bytes
                if func in CONVOLUTIONS and after:  # beside the copies; one gradient before the next is made
                    self._hold(after.pop(0), name)
        self.events.extend(~number for number in copies)
        if self.phase != "setup":
            for num_bytes in self.workspaces.lasting(func, args, in_backward=_in_backward()):
                self._birth(num_bytes, "cuBLAS", "workspaces")
        for group in after:
            self._hold(group, name)

    def _by_autograd(self) -> bool:
        """Return whether autograd itself adds: what a function written in Python adds is added as it says.

        Between autograd's engine and the operation there is no Python code of anyone else.
        """
        if not _in_backward() or torch.is_grad_enabled():
            return False
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals.get("__name__") in BETWEEN:
            caller = caller.f_back
        return caller is None or caller.f_code.co_name == ENGINE  # of CUDA the engine has threads of its own

    def _hold(self, group: Group, name: str) -> None:
        """Log blocks that are held together for a while."""
        held = [self._workspace(block, f"workspace of {name}") for block in group]
        self.events.extend(~number for number in held)

    def _note_sum(self, func: Any, args: Any, out: Tensor) -> None:
        first = args[0]
        if not isinstance(first, Tensor) or first.shape != out.shape or first.dtype is not out.dtype:
            return
        known = self._alive.get(first.untyped_storage()._cdata)
        number = self.track(out, str(func))
        if first._base is not None:  # a view: its base holds the storage too, so autograd adds elsewhere
            return
        # autograd asks whether the summand is dense, in whatever order of dimensions
        if known is not None and number is not None and is_non_overlapping_and_dense_or_false(first):
            self.sums.append((number, known[0]))

    def _same(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Answer whether two tensors are the same: truly if both are known, else yes, as for a comparison."""
        answer = known_values.real_result(func, args, kwargs)
        if answer is None:
            self.guess(str(func), "two tensors taken as the same")
        return answer is not False

    def _scalar(self, tensor: Tensor) -> Any:
        """Answer `.item()` and `bool(...)`: the real value of integers, a guess for floating point."""
        value = known_values.value_of(tensor)
        if value is not None and not isinstance(value, FakeTensor):
            with _disable_current_modes():
                return value.item()
        answer = 1.0 if tensor.dtype.is_floating_point else tensor.dtype is torch.bool or 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.guess(str(SCALAR), f"the value of a {dtype} taken as {answer}")
        return answer


def trace_job(
    job: Job,
    recipe: Recipe,
    *,
    sizes: Sizes | None = None,
    workspaces: Workspaces | None = None,
    device: str = "cpu",
    last_micro_batch: bool = False,
) -> Trace:
    """Trace one training step; the rules for its device must be installed.

    With `last_micro_batch` only the last of several accumulated ones is stepped, which meets the gradients of
    the others: the same peak for half the time.
    """
    start_s = time.perf_counter()
    sizes = dict(sizes if sizes is not None else job.sizes)
    rules.install_for_no_data()
    dynamic_sizes.declare(true_share=job.true_share)
    asked = (sizes, workspaces or Workspaces(), device, last_micro_batch)
    with run_eagerly() as was_compiled, device_thread() as thread:
        trace = _trace_step(job, recipe, *asked)
        if thread.made_graphs and device == "cpu":  # traced in the order of a first step alone
            thread.go_on()
            trace = _trace_step(job, recipe, *asked)
    leans_on: tuple[Lean, ...] = (*trace.leans_on, *(("eager",) if was_compiled() else ()))
    return dataclasses.replace(trace, leans_on=leans_on, seconds=time.perf_counter() - start_s)


def _trace_step(
    job: Job,
    recipe: Recipe,
    sizes: dict[str, int],
    workspaces: Workspaces,
    device: str,
    last_micro_batch: bool,
) -> Trace:
    workspaces.forget()
    recurrent.begin(num_multiprocessors=workspaces.num_multiprocessors)
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    batch_on_host = make_batch(job, sizes, mode=mode)
    gc.collect()
    autocast = AUTOCAST.get(recipe.precision)
    tracer = Tracer(device=device, workspaces=workspaces, autocast=autocast)
    with mode, tracer, _ModuleNames(tracer):
        parts = make_parts(job, recipe, device=device)
        rules.after_imports()  # building the model imported what it needs
        parts.optimizer = eight_bit_adam.without_data(parts.optimizer)
        held = _track_model(tracer, parts.model)
        if last_micro_batch:
            _hold_gradients(tracer, parts.model)
        batch = map_tensors(batch_on_host, lambda tensor: _make_fake(tensor, tracer))
        gc.collect()
        start = len(tracer.events)

        def mark(phase: StepPhase) -> None:
            if phase == "optimizer":
                _track_gradients(tracer, parts.model)
            tracer.phase = phase
            tracer.events.append(phase)

        run_step(parts, job, recipe, batch, device=device, keep_gradients=last_micro_batch, mark=mark)
        for tensor in recurrent.lasting_blocks():
            tracer.track(tensor, "cuDNN", "workspaces")
        hosted = _track_state(tracer, parts.optimizer)
        replaced = _replaced(tracer, parts.model, held)
        events = list(tracer.events)  # what dies with this function is no part of the step
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in parts.model.parameters()]
    log = two_steps(events, tracer.born, start=start, hosted=hosted, replaced=replaced, sums=tracer.sums)
    return Trace(
        sizes=sizes,
        storages=log.storages,
        events=log.events,
        marks=log.marks,
        num_parameters=sum(count for count, _ in counts),
        num_trainable=sum(count for count, trainable in counts if trainable),
        guesses=tuple(tracer.guesses),
        attention=dict(tracer.attention),
        leans_on=_leans_on(tracer),
        native=device == "cuda",
    )


def _refuse_stranger(parameter: nn.Parameter) -> None:
    raise BadInput(
        f"the step uses a parameter of {tuple(parameter.shape)} that is not part of the model",
        hint="name its module in the loss or the step itself, or make it a part of the model",
    )


def _leans_on(tracer: Tracer) -> tuple[Lean, ...]:
    found: list[Lean] = list(recurrent.leans_on())
    if any(born.op.startswith(CONVOLUTION_WORKSPACE) for born in tracer.born):
        found.append("convolutions")
    return tuple(found)


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


def _in_backward() -> bool:
    """Return whether autograd's engine is running, be it for a gradient that the forward asks for."""
    return int(torch._C._current_graph_task_id()) != -1


def _device_of(fake: FakeTensor) -> torch.device:
    """Return the device that a fake tensor reports: meta inside a kernel, else the device it stands for."""
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device


def _make_fake(leaf: Tensor, tracer: Tracer) -> Tensor:
    if leaf.is_nested:
        refuse_nested()
    # Every tensor is sent to the device by itself: what is a view of another on the host is a copy there.
    fake = torch.empty_like(leaf, device=tracer.device, requires_grad=leaf.requires_grad)
    if not leaf.dtype.is_floating_point and not isinstance(leaf, FakeTensor):
        setattr(fake, known_values.VALUE, leaf)
    tracer.track(fake, "input", "inputs")
    return fake


def _hold_gradients(tracer: Tracer, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            tracer.track(parameter.grad, "gradient", "gradients")


def _track_gradients(tracer: Tracer, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            tracer.track(parameter.grad, "gradient", "gradients")


def _track_model(tracer: Tracer, model: nn.Module) -> dict[TensorPlace, int]:
    """Mark what the model holds before the step; return the number of every storage, by place."""
    held = _numbers_of(tracer, model, "buffers")
    for parameter in model.parameters():
        tracer.track(parameter, "parameter", "parameters")
    return held


def _numbers_of(
    tracer: Tracer, model: nn.Module, component: Component | None = None
) -> dict[TensorPlace, int]:
    found = ((place, tracer.track(tensor, "buffer", component)) for place, tensor in held_tensors(model))
    return {place: number for place, number in found if number is not None}


def _replaced(tracer: Tracer, model: nn.Module, held: dict[TensorPlace, int]) -> dict[int, int]:
    """Return which storages of the model have others in their place after the step."""
    after = _numbers_of(tracer, model)
    replaced = {old: after[place] for place, old in held.items() if after.get(place, old) != old}
    for old, new in replaced.items():
        tracer.born[new].component = tracer.born[old].component
    return replaced


def _track_state(tracer: Tracer, optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Mark the optimizer's state; the numbers of step counters, which live on the host."""
    hosted: set[int] = set()
    for each in _with_wrapped(optimizer) if optimizer is not None else ():
        groups = vars(each).get("param_groups", ())
        on_device = {
            id(parameter)
            for group in groups
            for parameter in group["params"]
            if group.get("fused") or group.get("capturable")
        }
        for place, tensor in held_tensors({**vars(each), "param_groups": None}):
            if len(place) == 3 and place[0] == "state" and place[2] == "step" and place[1] not in on_device:
                number = tracer.forget(tensor)
                if number is not None:
                    hosted.add(number)
            else:
                tracer.track(tensor, "optimizer state", "optimizer state")
    return hosted


def _with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """List an optimizer and those it steps itself, such as the one within SAM."""
    found: list[torch.optim.Optimizer] = [optimizer]
    for each in found:
        parts = [
            part for value in vars(each).values() for part in (value if isinstance(value, list) else [value])
        ]
        known = {id(known) for known in found}
        found += [p for p in parts if isinstance(p, torch.optim.Optimizer) and id(p) not in known]
    return found
