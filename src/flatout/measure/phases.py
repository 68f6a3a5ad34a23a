"""Forward, backward, optimizer and transfer, observed without changing the script.

A patch of `nn.Module.__call__` acts only at the outermost call: 0.3 µs per nested module, where global module
hooks cost ten times that and break compiled graphs.  `torch.autograd.backward` covers `Tensor.backward` too.
Every optimizer class gets a timed `step`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.measure.clock import BACKWARD, FORWARD, OPTIMIZER, REST, TRANSFER, Clock, DeviceMarks, ident, now
from flatout.measure.lines.live_objects import with_subclasses
from flatout.measure.lines.module_calls import ModuleCalls
from flatout.measure.patches import Patches, keep_out_of_graphs
from flatout.measure.run.steps import BACKWARD_CALL, MODEL_CALL, MODEL_CALLED, OPTIMIZER_STEP

if TYPE_CHECKING:
    from flatout.measure.run.observer import Observer

EVALUATION_S = 60.0
DYNAMO_MODULES = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


def install_phases(observer: Observer, patches: Patches) -> None:
    import torch  # noqa: F401 - dynamo's frame evaluation, which is told below, is a part of it

    observers = type(observer)
    keep_out_of_graphs(Clock.enter, Clock.leave, DeviceMarks.mark, ModuleCalls.note, _outside_optimizer)
    keep_out_of_graphs(observers.adopt_thread, observers.after_model_call, observers.note_optimizer)
    keep_out_of_graphs(observers.mark, observers.has_cut_training_short)
    keep_out_of_graphs(type(observer.process.training).note_loss)
    _patch_modules(observer, patches)
    _patch_backward(observer, patches)
    _patch_optimizers(observer, patches)


def _patch_modules(observer: Observer, patches: Patches) -> None:
    import torch

    clock = observer.clock
    training_follows = _expect_training(observer, patches)
    module_type = torch.nn.Module
    call = module_type.__dict__["__call__"]

    def outermost(module: Any, *args: Any, **kwargs: Any) -> Any:
        # one comparison for nested modules: a region other than rest or optimizer is already open
        top = clock.stack[-1]
        if top == FORWARD or (top != REST and top != OPTIMIZER) or ident() != clock.owner:
            return call(module, *args, **kwargs)
        clock.enter(FORWARD)
        if observer.marks is not None:
            observer.marks.mark(FORWARD)
        try:
            result = call(module, *args, **kwargs)
        finally:
            spent_s = clock.leave()
        observer.num_forwards += 1
        observer.outermost_types.add(type(module))
        if observer.tools.module_calls is not None:
            observer.tools.module_calls.note(module, args, kwargs, result, sys._getframe(1), spent_s)
        if not training_follows():
            observer.after_model_call((MODEL_CALL, id(module)), f"{type(module).__name__}{MODEL_CALLED}")
        return result

    outermost.unwatched = (outermost, call)  # type: ignore[attr-defined]
    patches.replace(module_type, "__call__", outermost)
    # dynamo remembers the __call__ it found at its own import as the unpatched one and then inlines
    # forward(); if it was imported earlier, tell it about this one
    for name in DYNAMO_MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and hasattr(loaded, "unpatched_nn_module_call"):
            patches.replace(loaded, "unpatched_nn_module_call", outermost)
    patches.on_undo(lambda: _tell_dynamo(outermost, call))


def narrow_modules(observer: Observer, patches: Patches) -> None:
    """Watch only the types of modules that warm-up has seen called outermost.

    Every nested module then runs as if unobserved.  Compiled code guards on these attributes, so jobs that
    use it stay as they are.
    """
    import torch

    module_type = torch.nn.Module
    watched = module_type.__dict__["__call__"]
    ours, unwatched = getattr(watched, "unwatched", (None, None))
    if ours is not watched or not observer.outermost_types or has_compiled():
        return  # a wrapper that the job put around ours has copied the attribute
    for kind in observer.outermost_types:
        if not any("__call__" in base.__dict__ for base in kind.__mro__[: kind.__mro__.index(module_type)]):
            patches.replace(kind, "__call__", watched)
    patches.replace(module_type, "__call__", unwatched)


def has_compiled() -> bool:
    """Return whether dynamo has compiled anything; that it is imported proves nothing."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return loaded is not None and loaded.counters["frames"]["total"] > 0


def _expect_training(observer: Observer, patches: Patches) -> Callable[[], bool]:
    """Tell evaluation before training from inference: a script that makes an optimizer will use it.

    Only for a while, because training scripts also have options that only evaluate.
    """
    from torch.optim.optimizer import Optimizer

    make = Optimizer.__init__
    made_at: list[float] = []

    def make_noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        made_at.append(now())
        observer.made_at[optimizer] = observer.user_code.place(sys._getframe(1))[0]

    patches.replace(Optimizer, "__init__", make_noted)
    return lambda: bool(made_at) and now() - made_at[0] < EVALUATION_S


def _tell_dynamo(patched: Any, original: Any) -> None:
    """Correct dynamo if it was imported under the patch and took the patch for torch's own."""
    for name in DYNAMO_MODULES:
        loaded = sys.modules.get(name)
        if getattr(loaded, "unpatched_nn_module_call", None) is patched:
            loaded.unpatched_nn_module_call = original  # type: ignore[union-attr]


def _patch_backward(observer: Observer, patches: Patches) -> None:
    import torch

    clock = observer.clock
    in_tensor_backward = False

    def timed(function: Callable[..., Any], marks_step: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if ident() != clock.owner or BACKWARD in clock.stack:
                return function(*args, **kwargs)
            clock.enter(BACKWARD)
            if observer.marks is not None:
                observer.marks.mark(BACKWARD)
            try:
                result = function(*args, **kwargs)
            finally:
                clock.leave()
                if observer.marks is not None:
                    observer.marks.mark(REST)
            if marks_step:
                observer.process.training.note_loss(args[0] if args else kwargs.get("tensors"))
                observer.num_backwards += 1
                if not in_tensor_backward:
                    observer.after_model_call((BACKWARD_CALL, 0), "backward")
            return result

        return wrapped

    tensor_backward: Callable[..., Any] = torch.Tensor.backward

    @functools.wraps(tensor_backward)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        # Tensor.backward is a torch function: inside it a counting mode is off and cannot be removed, so
        # a step must not end there
        nonlocal in_tensor_backward
        if in_tensor_backward or ident() != clock.owner:
            return tensor_backward(*args, **kwargs)
        in_tensor_backward = True
        before = observer.num_backwards
        try:
            result = tensor_backward(*args, **kwargs)
        finally:
            in_tensor_backward = False
        if observer.num_backwards > before:
            observer.after_model_call((BACKWARD_CALL, 0), "backward")
        return result

    patches.replace(torch.Tensor, "backward", outermost)
    # Tensor.backward looks torch.autograd.backward up at every call
    patches.replace(torch.autograd, "backward", timed(torch.autograd.backward, True))
    patches.replace(torch.autograd, "grad", timed(torch.autograd.grad, False))


def _patch_optimizers(observer: Observer, patches: Patches) -> None:
    """Time the `step` of every optimizer class, existing and future.

    torch's global hooks would do, but a compiled step meets them in its own code: a graph break that the job
    does not have.  When traced, the timed function stands for the original; most steps break the graph
    themselves and are then called.
    """
    from torch.optim.optimizer import Optimizer

    hook_step: Callable[[Any], None] = Optimizer._patch_step_function
    watched: set[type] = set()

    def hook_and_time(optimizer: Any) -> None:
        hook_step(optimizer)
        watch(type(optimizer))

    def watch(kind: type) -> None:
        owner = next(base for base in kind.__mro__ if "step" in base.__dict__)  # at last Optimizer
        step = owner.__dict__["step"]
        if owner not in watched and getattr(step, "hooked", False):
            watched.add(owner)
            patches.replace(owner, "step", _timed_step(observer, step))

    patches.replace(Optimizer, "_patch_step_function", hook_and_time)
    for kind in with_subclasses(Optimizer):
        watch(kind)


def _timed_step(observer: Observer, step: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    clock = observer.clock

    def timed(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(optimizer, *args, **kwargs)
        if observer.removed or OPTIMIZER in clock.stack or not observer.adopt_thread():
            return step(optimizer, *args, **kwargs)  # a wrapper optimizer calls its inner one
        clock.enter(OPTIMIZER)
        if observer.marks is not None:
            observer.marks.mark(OPTIMIZER)
        given, named = _outside_optimizer(clock, args), _outside_optimizer(clock, kwargs)
        try:
            while True:
                num_backwards = observer.num_backwards
                result = step(optimizer, *given, **named)
                if not observer.has_cut_training_short(since=num_backwards):
                    break
        finally:
            clock.leave()
        observer.note_optimizer(optimizer)
        observer.mark((OPTIMIZER_STEP, id(optimizer)), f"{type(optimizer).__name__}.step")
        return result

    return timed


def _outside_optimizer(clock: Clock, given: Any) -> Any:
    """Time a closure (L-BFGS, every Lightning step) outside the optimizer: it runs forward and backward."""
    closure = given.get("closure") if isinstance(given, dict) else next(iter(given), None)
    if not callable(closure):
        return given

    def outside(*args: Any, **kwargs: Any) -> Any:
        clock.enter(REST)
        try:
            return closure(*args, **kwargs)
        finally:
            clock.leave()

    return {**given, "closure": outside} if isinstance(given, dict) else (outside, *given[1:])


def install_transfers(observer: Observer, patches: Patches) -> None:
    """Time host-to-device copies as a phase of their own, with a GPU only."""
    import torch

    clock = observer.clock

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda or clock.stack[-1] != REST or ident() != clock.owner:
                return method(tensor, *args, **kwargs)
            clock.enter(TRANSFER)
            try:
                return method(tensor, *args, **kwargs)
            finally:
                clock.leave()

        return wrapped

    for name in ("to", "cuda"):
        patches.replace(torch.Tensor, name, timed(getattr(torch.Tensor, name)))
