"""Forward, backward, optimizer and transfer, seen without touching the script.

`nn.Module.__call__` is replaced and acts only at the outermost call: 0.3 µs per nested module, where
global module hooks cost ten times that and break compiled graphs.  `torch.autograd.backward` covers
`Tensor.backward` too.  Optimizers call global hooks around their step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from flatout.measure.clock import BACKWARD, FORWARD, OPTIMIZER, REST, TRANSFER, ident, now
from flatout.measure.patches import Patches, keep_out_of_graphs
from flatout.measure.run.steps import BACKWARD_CALL, MODEL_CALL, OPTIMIZER_STEP

if TYPE_CHECKING:
    from flatout.measure.run.observer import Observer

EVALUATION_S = 60.0
DYNAMO_MODULES = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


def install_phases(observer: Observer, patches: Patches) -> None:
    _patch_modules(observer, patches)
    _patch_backward(observer, patches)
    _patch_optimizers(observer, patches)


def _patch_modules(observer: Observer, patches: Patches) -> None:
    import torch

    clock = observer.clock
    training_follows = _expect_training(patches)
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
            observer.tools.module_calls.note(module, args, kwargs, sys._getframe(1), spent_s)
        if not training_follows():
            observer.after_model_call((MODEL_CALL, id(module)), f"{type(module).__name__} call")
        return result

    outermost.unwatched = call  # type: ignore[attr-defined]
    patches.replace(module_type, "__call__", outermost)
    # dynamo remembers the __call__ it found at its own import as the unpatched one and then inlines
    # forward(); where it was imported earlier, tell it about this one
    for name in DYNAMO_MODULES:
        loaded = sys.modules.get(name)
        if loaded is not None and hasattr(loaded, "unpatched_nn_module_call"):
            patches.replace(loaded, "unpatched_nn_module_call", outermost)
    patches.on_undo(lambda: _tell_dynamo(outermost, call))


def narrow_modules(observer: Observer, patches: Patches) -> None:
    """Once warm-up has shown which modules are called outermost, watch their types only.

    Every nested module then runs as if nobody watched.  Compiled code has guards on these attributes,
    so jobs that use it stay as they are.
    """
    import torch

    module_type = torch.nn.Module
    watched = module_type.__dict__["__call__"]
    unwatched = getattr(watched, "unwatched", None)
    if unwatched is None or not observer.outermost_types or _has_compiled():
        return
    for kind in observer.outermost_types:
        if not any("__call__" in base.__dict__ for base in kind.__mro__[: kind.__mro__.index(module_type)]):
            patches.replace(kind, "__call__", watched)
    patches.replace(module_type, "__call__", unwatched)


def _has_compiled() -> bool:
    """Whether dynamo has compiled anything; optimizers import it in every job."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return loaded is not None and loaded.counters["frames"]["total"] > 0


def _expect_training(patches: Patches) -> Callable[[], bool]:
    """Tells evaluation before training from inference: who makes an optimizer means to use it.

    For a while only, because training scripts also have options that only evaluate.
    """
    from torch.optim.optimizer import Optimizer

    make = Optimizer.__init__
    made_at: list[float] = []

    def make_noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        made_at.append(now())

    patches.replace(Optimizer, "__init__", make_noted)
    return lambda: bool(made_at) and now() - made_at[0] < EVALUATION_S


def _tell_dynamo(patched: Any, original: Any) -> None:
    """Where dynamo was imported under the patch, it took that for torch's own."""
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
    from torch.optim import optimizer as optimizers

    clock = observer.clock
    outermost: FrameType | None = None  # the step under way; both of its hooks are called from this frame
    in_hook = False

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        nonlocal outermost
        if not observer.adopt_thread():
            return None
        caller = sys._getframe(1)
        if outermost is not None and _is_called_from(outermost, caller):
            return None  # a wrapper optimizer calls its inner one
        if outermost is not None and OPTIMIZER in clock.stack:
            clock.stack.remove(OPTIMIZER)  # that step raised, and the script went on
        outermost = caller
        clock.enter(OPTIMIZER)
        if observer.marks is not None:
            observer.marks.mark(OPTIMIZER)
        return _outside_optimizer(observer, args, kwargs)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outermost, in_hook
        if ident() != clock.owner or outermost is not sys._getframe(1):
            return
        outermost = None
        if clock.stack[-1] == OPTIMIZER:
            clock.leave()
        in_hook = True
        try:
            observer.note_optimizer(optimizer)
            observer.mark((OPTIMIZER_STEP, id(optimizer)), f"{type(optimizer).__name__}.step")
        finally:
            in_hook = False

    def remove_after() -> None:
        if not in_hook:  # torch is walking its hooks otherwise; without `before` this one does nothing
            after_handle.remove()

    for hook in (before, after):
        keep_out_of_graphs(hook)
    patches.on_undo(optimizers.register_optimizer_step_pre_hook(before).remove)
    after_handle = optimizers.register_optimizer_step_post_hook(after)
    patches.on_undo(remove_after)


def _is_called_from(frame: FrameType, callee: FrameType | None) -> bool:
    while callee is not None and callee is not frame:
        callee = callee.f_back
    return callee is not None


def _outside_optimizer(observer: Observer, args: Any, kwargs: Any) -> Any:
    """A closure (L-BFGS, every Lightning step) runs forward and backward inside step(): not optimizer."""
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def outside(*inner: Any, **named: Any) -> Any:
        observer.clock.enter(REST)
        try:
            return closure(*inner, **named)
        finally:
            observer.clock.leave()

    if "closure" in kwargs:
        return args, {**kwargs, "closure": outside}
    return (args[0], outside, *args[2:]), kwargs


def install_transfers(observer: Observer, patches: Patches) -> None:
    """Host-to-device copies as a phase of their own; only where there is a GPU."""
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
