"""A job from objects that exist already: a model or a step function, one example batch, an optimizer.

What `make_model` of such a job gives, precisely: a deep copy of the module in which every parameter, buffer
and tensor attribute is a fresh tensor of the same shape, dtype and strides on the default device of the
moment (`with torch.device(...)`).  Values are copied where the copy has data; on tensors without data, and
from a model on the meta device, there is nothing to copy.  Sharing is kept (tied weights stay tied),
gradients are not copied, and the given model is never touched.

A step function is taken apart into its loss: the modules it names (in its closure, its globals, or on the
object it is a method of) are replaced by copies, and what it returns is the loss.  So it must not run
backward or the optimizer itself.  The same applies to modules that a loss names besides its model.  Modules
that are reached only through other functions are not found here; the trace refuses their parameters.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput, first_line
from flatout.memory.jobs.example_batch import maker_of
from flatout.memory.jobs.held_tensors import fresh_tensor, held_tensors
from flatout.memory.jobs.job import Job, adamw

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Loss = Callable[["nn.Module", Any], "Tensor"]
MakeOptimizer = Callable[["list[nn.Parameter]"], "torch.optim.Optimizer"]


def job_of(
    model_or_step: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    loss: Loss | None = None,
    batch_size: int | None = None,
    name: str | None = None,
) -> Job:
    """Return the job that trains a model on batches like `batch` (an example or a batch maker).

    `model_or_step` is a module, a LightningModule, or a function `step(batch)` that returns the loss.
    `optimizer` is an instance (its class, settings and parameter groups are kept), a list of instances, a
    class, a function of the list of trainable parameters, or None for those that the step names, else AdamW.
    `loss(model, batch)` defaults to the model's own.
    """
    from torch import nn

    make_batch, sizes = maker_of(batch, batch_size=batch_size)
    if isinstance(model_or_step, nn.Module):
        model = model_or_step
        if is_lightning(type(model)) and loss is None:
            from flatout.memory.jobs import from_lightning

            return from_lightning.job(
                lambda: copy_model(model),
                make_batch=make_batch,
                sizes=sizes,
                name=name or type(model).__name__,
                make_optimizer=optimizer_maker(optimizer, model=model) if optimizer is not None else None,
            )
        return job_of_model(
            model,
            make_batch=make_batch,
            sizes=sizes,
            optimizer=optimizer,
            loss=loss,
            name=name or type(model).__name__,
        )
    if loss is not None or not callable(model_or_step) or isinstance(model_or_step, type):
        raise _neither_module_nor_step(model_or_step, has_loss=loss is not None)
    return _job_of_step(
        model_or_step,
        make_batch=make_batch,
        sizes=sizes,
        optimizer=optimizer,
        name=name or _name(model_or_step),
    )


def _neither_module_nor_step(found: Any, *, has_loss: bool) -> BadInput:
    from torch import nn

    name = _name(found) if callable(found) else type(found).__name__
    if isinstance(found, type) and issubclass(found, nn.Module):
        return BadInput(f"expected a module, got the class {name}", hint=f"give a module: {name}(...)")
    if has_loss and callable(found):
        return BadInput(
            f"expected a module beside loss=, got the function {name}",
            hint="give the module itself; or omit loss=, and let the function return the loss of a batch",
        )
    return BadInput(f"expected a module or a step function, got {name}")


def job_of_model(
    model: nn.Module,
    *,
    make_batch: Callable[..., Any],
    sizes: dict[str, int],
    optimizer: Any,
    loss: Loss | None,
    name: str,
) -> Job:
    """Return the job of a model and of the modules that its loss names, such as a teacher."""
    from torch import nn

    parts = {id(part) for part in model.modules()}
    loss = loss or own_loss
    used = _find_used(loss) if isinstance(loss, types.FunctionType | types.MethodType) else {}
    others = {id(v): v for v in used.values() if isinstance(v, nn.Module) and id(v) not in parts}
    originals = [model, *others.values()] if any(map(_holds_tensors, others.values())) else [model]
    whole = model if len(originals) == 1 else nn.ModuleList(originals)

    def loss_of_copies(copies: nn.Module, batch: Any) -> Tensor:
        made = list(copies.children())
        replaced = {id(original): its_copy for original, its_copy in zip(originals, made, strict=True)}
        return _rebind(loss, replaced)(made[0], batch)  # type: ignore[no-any-return]

    return Job(
        name=name,
        make_model=lambda: copy_model(whole),
        make_batch=make_batch,
        loss=loss if whole is model else loss_of_copies,
        make_optimizer=optimizer_maker(optimizer, model=whole),
        sizes=sizes,
    )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in held_tensors(module))


def is_lightning(found: type) -> bool:
    """Return whether a class is a LightningModule, by the two methods that matter."""
    from torch import nn

    return issubclass(found, nn.Module) and all(
        callable(getattr(found, method, None)) for method in ("training_step", "configure_optimizers")
    )


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's own loss: `.loss`, `["loss"]`, or a scalar."""
    import torch

    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (list, tuple)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(output).__name__
    raise BadInput(
        f"{type(model).__name__} returns {shown}, which is not a loss",
        hint="give loss=lambda model, batch: ...",
    )


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy with its own tensors on the default device; see the module's docstring."""
    import torch
    from torch import nn

    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise BadInput(
            f"{type(model).__name__} holds a scripted module, whose memory cannot be predicted",
            hint="give the model as it is before torch.jit: the same operations run",
        )
    memo: dict[int, Any] = {}
    for _place, tensor in held_tensors(model):
        if nn.parameter.is_lazy(tensor):
            raise BadInput(
                f"{type(model).__name__} has lazy layers whose sizes are not known yet",
                hint="call the model on a batch once, before it is planned",
            )
        if type(tensor) in (torch.Tensor, nn.Parameter):
            memo.setdefault(id(tensor), fresh_tensor(tensor))
    try:
        made: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:  # locks, open files, tensors inside a graph
        raise BadInput(
            f"{type(model).__name__} cannot be copied: {first_line(error)}",
            hint="name a function that builds it instead: pkg.module:build",
        ) from error
    for original, its_copy in zip(model.modules(), made.modules(), strict=True):
        if original._compiled_call_impl is not None:  # which a copy drops
            its_copy.compile()
    return made


def optimizer_maker(optimizer: Any, *, model: nn.Module | None) -> MakeOptimizer:
    """Return `make_optimizer(trainable)` from an optimizer, several, a class, a function, or None."""
    if optimizer is None:
        return adamw
    if several := _listed(optimizer):
        if model is None:
            raise BadInput(
                "an existing optimizer belongs to an existing model",
                hint="give the optimizer as a function of the list of parameters",
            )
        from flatout.memory.jobs.optimizer_copies import make_copies_of

        return make_copies_of(several, model)
    if isinstance(optimizer, type) or callable(optimizer):
        make: MakeOptimizer = optimizer
        return make
    raise BadInput(
        f"the optimizer is {type(optimizer).__name__}, neither an optimizer nor a function",
        hint="give an optimizer, its class, or a function of the parameters",
    )


def _listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return existing optimizers as a list: one, or a list of them, such as those of a GAN."""
    import torch

    several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    return several if all(isinstance(each, torch.optim.Optimizer) for each in several) else []


def _job_of_step(
    step: Callable[[Any], Any],
    *,
    make_batch: Callable[..., Any],
    sizes: dict[str, int],
    optimizer: Any,
    name: str,
) -> Job:
    import torch
    from torch import nn

    used = _find_used(step)
    originals = list({id(v): v for v in used.values() if isinstance(v, nn.Module)}.values())
    if not originals:
        raise BadInput(
            f"{name} names no module, so there is nothing to plan",
            hint="let the step use its model by name, or give the model and loss=",
        )
    if optimizer is None:
        found = {id(each): each for each in used.values() if isinstance(each, torch.optim.Optimizer)}
        optimizer = list(found.values()) or None
    whole = originals[0] if len(originals) == 1 else nn.ModuleList(originals)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        copies = [model] if len(originals) == 1 else list(model.children())
        replaced = {id(original): made for original, made in zip(originals, copies, strict=True)}
        answer: Any = _rebind(step, replaced)(batch)
        trainable = isinstance(answer, torch.Tensor) and (answer.requires_grad or not torch.is_grad_enabled())
        if trainable and answer.dim() == 0:
            return answer  # type: ignore[no-any-return]
        raise BadInput(
            f"{name} returned {type(answer).__name__}, not a loss to run backward from",
            hint="return the loss, and leave backward and the optimizer to the plan",
        )

    return Job(
        name=name,
        make_model=lambda: copy_model(whole),
        make_batch=make_batch,
        loss=loss,
        make_optimizer=optimizer_maker(optimizer, model=whole),
        sizes=sizes,
    )


def _find_used(step: Callable[..., Any]) -> dict[str, Any]:
    """Return what a step names: closure, globals, and the attributes of a method's object."""
    from torch import nn

    if isinstance(step, types.MethodType):
        owner = step.__self__
        function = step.__func__
        attributes = {"self": owner} if isinstance(owner, nn.Module) else dict(getattr(owner, "__dict__", {}))
    elif isinstance(step, types.FunctionType):
        function, attributes = step, {}
    else:
        raise BadInput(
            f"a step must be a plain function or method, got {type(step).__name__}",
            hint="def step(batch): return loss_of(model(batch))",
        )
    code = function.__code__
    if "backward" in code.co_names:
        place = f"{code.co_filename}:{code.co_firstlineno}"
        raise BadInput(
            f"{_name(step)} runs backward itself ({place})",
            hint="return the loss, and leave backward and the optimizer to the plan",
        )
    variables = inspect.getclosurevars(function)
    return {**variables.globals, **variables.nonlocals, **attributes}


def _rebind(step: Callable[..., Any], replaced: Mapping[int, Any]) -> Callable[..., Any]:
    """Return the step with other objects in place of those it names."""
    if isinstance(step, types.MethodType):
        owner = step.__self__
        if id(owner) in replaced:
            return types.MethodType(step.__func__, replaced[id(owner)])
        twin = copy.copy(owner)
        for key, value in vars(owner).items():
            setattr(twin, key, replaced.get(id(value), value))
        return types.MethodType(_rebind_function(step.__func__, replaced), twin)  # type: ignore[arg-type]
    assert isinstance(step, types.FunctionType)
    return _rebind_function(step, replaced)


def _rebind_function(function: types.FunctionType, replaced: Mapping[int, Any]) -> types.FunctionType:
    names = function.__code__.co_names
    namespace = function.__globals__
    if any(id(namespace.get(key)) in replaced for key in names):
        namespace = {key: replaced.get(id(value), value) for key, value in namespace.items()}
    cells = tuple(
        types.CellType(replaced.get(id(cell.cell_contents), cell.cell_contents))
        for cell in function.__closure__ or ()
    )
    twin = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _name(step: Any) -> str:
    return str(getattr(step, "__qualname__", type(step).__name__))
