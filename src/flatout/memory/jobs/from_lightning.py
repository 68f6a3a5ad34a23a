"""A LightningModule as a job: its training_step is the loss, its configure_optimizers the optimizer.

Nothing of Lightning is imported: what matters are those two methods.  The module is stepped without a
Trainer, so `self.log` does nothing and `self.trainer` is not there.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flatout.ground.errors import BadInput
from flatout.ground.user_code import calling
from flatout.memory.jobs.example_batch import maker_of, map_tensors, tensors_of
from flatout.memory.jobs.job import Job

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MAKE_A_BATCH = "name a batch maker, pkg.module:make_batch, with def make_batch(*, batch_size): ..."


def job_of_class(
    shape: type[nn.Module],
    *,
    settings: Mapping[str, Any] | None,
    make_batch: Any = None,
    name: str,
) -> Job:
    """Return the job of a class, built with the settings' `model` section (or its init_args).

    Batches come from `make_batch`, the class's own `make_batch`, or its `example_input_array`.
    """
    arguments = _arguments(shape, settings or {}, name=name)

    def make_model() -> nn.Module:
        return shape(**arguments)

    batch = make_batch if make_batch is not None else getattr(shape, "make_batch", None)
    if batch is None:
        batch = _example(make_model, name=name)
    maker, sizes = maker_of(batch)
    return job(make_model, make_batch=maker, sizes=sizes, name=name)


def job(
    make_module: Callable[[], nn.Module],
    *,
    make_batch: Callable[..., Any],
    sizes: Mapping[str, int],
    name: str,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Job:
    made: list[weakref.ref[nn.Module]] = []  # the latest module: configure_optimizers is a method of it

    def make_model() -> nn.Module:
        module: Any = make_module()
        if getattr(module, "automatic_optimization", True) is False:
            raise BadInput(
                f"{name} optimizes by hand (automatic_optimization = False)",
                hint="name a build function instead: it returns model, batch maker, loss, optimizer",
            )
        module.log = module.log_dict = _log_nothing
        made[:] = [weakref.ref(module)]
        return module  # type: ignore[no-any-return]

    def configured(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        module: Any = made[0]() if made else None
        if module is None:
            raise BadInput(f"the optimizer of {name} is asked for before its model is made")
        with calling(f"configure_optimizers of {name}"):
            given = module.configure_optimizers()
        return optimizer_in(given, name=name)

    return Job(
        name=name,
        make_model=make_model,
        make_batch=make_batch,
        loss=lambda module, batch: _training_loss(module, batch, name=name),
        make_optimizer=make_optimizer or configured,
        sizes=sizes,
    )


def optimizer_in(given: Any, *, name: str) -> torch.optim.Optimizer:
    """Return the one optimizer in whatever configure_optimizers returned."""
    import torch

    found: list[torch.optim.Optimizer] = []
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (list, tuple)):
        given = given[0]  # optimizers, schedulers
    for item in given if isinstance(given, (list, tuple)) else [given]:
        optimizer = item.get("optimizer") if isinstance(item, Mapping) else item
        if isinstance(optimizer, torch.optim.Optimizer):
            found.append(optimizer)
    if len(found) == 1:
        return found[0]
    raise BadInput(
        f"configure_optimizers of {name} gives {len(found)} optimizers; a plan needs exactly one",
        hint="name a build function instead: it returns model, batch maker, loss, optimizer",
    )


def _training_loss(module: Any, batch: Any, *, name: str) -> Tensor:
    import torch

    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    raise BadInput(
        f"training_step of {name} returned {type(output).__name__}, not a loss",
        hint="return the loss, or a dict with the key loss",
    )


def _log_nothing(*_arguments: Any, **_options: Any) -> None:
    """Stand in for `self.log`, which wants a Trainer."""


def _arguments(shape: type, settings: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return the arguments of the class; refuse with the names of those that the settings lack."""
    section = settings.get("model")
    section = section if isinstance(section, Mapping) else {}
    given = section.get("init_args", {}) if "class_path" in section else section
    parameters = inspect.signature(shape).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {key: value for key, value in (given or {}).items() if takes_any or key in parameters}
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in arguments
    ]
    if missing:
        raise BadInput(
            f"{name} cannot be built: {', '.join(missing)} not given",
            hint="put them under model.init_args in the config, or name a build function",
        )
    return arguments


def _example(make_module: Callable[[], nn.Module], *, name: str) -> Any:
    """Return the module's example_input_array, filled with harmless values."""
    import torch

    with torch.device("meta"), calling(f"building {name} to see its example_input_array"):
        module: Any = make_module()
    example = getattr(module, "example_input_array", None)
    if example is None or not list(tensors_of(example)):
        raise BadInput(f"{name} has neither make_batch nor example_input_array", hint=MAKE_A_BATCH)
    return map_tensors(example, _fill_values)


def _fill_values(tensor: Tensor) -> Tensor:
    import torch

    if tensor.device.type == "cpu":
        return tensor
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)  # an index that every table has
