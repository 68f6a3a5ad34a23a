"""How a model is named: a build function, a Hugging Face config folder, or a LightningModule.

    pkg.module:build          a function; so is path/to/file.py:build
    pkg.module:MyModule       a LightningModule, a class with training_step and configure_optimizers
    path/to/folder            with a config.json; no weights are read

A build function takes the settings of the run, if it takes anything, and returns a `Job`, a `Job` with its
`Recipe`, or the parts: model (or a function that makes it), batch maker (or an example batch), loss and
optimizer, in this order as a tuple or under these names in a dict or namespace.  Models are only described
here: they are made by the trace, on tensors without data.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.ground.errors import BadInput
from flatout.ground.user_code import attribute_of, calling, import_file, import_named, make_importable
from flatout.memory.jobs import from_huggingface, from_lightning
from flatout.memory.jobs.example_batch import maker_of, tensors_of
from flatout.memory.jobs.from_objects import is_lightning, job_of_model, optimizer_maker, own_loss
from flatout.memory.jobs.job import Job, Recipe

PARTS = ("model", "batch", "loss", "optimizer")
SPELLINGS = {"make_model": "model", "make_batch": "batch", "make_optimizer": "optimizer"}
FORMS = "pkg.module:build, path/to/file.py:build, or a folder with a config.json"
WHERE = "start in the folder that holds it, or name the file: path/to/file.py:build"
RETURNED = "return a flatout Job, or (model, batch maker, loss, optimizer)"


def load_job(
    name: str,
    *,
    settings: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    make_batch: str | None = None,
    task: str | None = None,
    padded: bool = True,
) -> tuple[Job, Recipe]:
    """Return the job behind a name, and the recipe of its build function (or the default).

    `settings` go to the build function or the LightningModule; `sizes` replace those of the job.
    `make_batch` names a batch maker for a LightningModule; `task` and `padded` are for config folders
    (see `from_huggingface`).
    """
    from torch import nn

    recipe = Recipe()
    if from_huggingface.is_config(name):
        job = from_huggingface.job_of_config(name, task=task, padded=padded)
    else:
        found = _find_named(name)
        if isinstance(found, type) and issubclass(found, nn.Module):
            job = _job_of_class(found, name=name, settings=settings, make_batch=make_batch)
        else:
            job, recipe = _job_of_build(found, name=name, settings=settings)
    job = _with_sizes(job, sizes or {})
    _check_batch(job, name=name)
    return job, recipe


def _job_of_class(
    found: type, *, name: str, settings: Mapping[str, Any] | None, make_batch: str | None
) -> Job:
    if not is_lightning(found):
        raise BadInput(
            f"{name} is a module without training_step and configure_optimizers: not a LightningModule",
            hint="name a function that returns (model, batch maker, loss, optimizer)",
        )
    maker = _find_named(make_batch) if make_batch is not None else None
    return from_lightning.job_of_class(found, settings=settings, make_batch=maker, name=name)


def _job_of_build(build: Any, *, name: str, settings: Mapping[str, Any] | None) -> tuple[Job, Recipe]:
    if isinstance(build, Job):
        return build, Recipe()
    if not callable(build):
        raise BadInput(
            f"{name} is {type(build).__name__}, not a function", hint=f"name one that can {RETURNED}"
        )
    arguments, named = _arguments(build, settings, name=name)
    with calling(name):
        result = build(*arguments, **named)
    return _interpret_result(result, name=name)


def _arguments(
    build: Any, settings: Mapping[str, Any] | None, *, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what to call a build function with: the settings as one argument, or each under its own name.

    Only a function of several arguments gets settings by name; the others keep their defaults.
    """
    parameters = [
        p
        for p in inspect.signature(build).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p.name for p in parameters if p.default is p.empty]
    by_name = {p.name: settings[p.name] for p in parameters if settings is not None and p.name in settings}
    if len(parameters) > 1 and by_name and by_name.keys() >= set(required):
        return (), by_name
    if len(required) > 1:
        raise BadInput(
            f"{name} takes {', '.join(required)}; a build function takes the settings, "
            "some of them by name, or nothing",
            hint="def build(settings): ...",
        )
    if required and settings is None:
        raise BadInput(f"{name} takes {required[0]}, and no config was given", hint="name the config to plan")
    return ((settings,) if parameters and settings is not None else ()), {}


def _interpret_result(result: Any, *, name: str) -> tuple[Job, Recipe]:
    """Return a job and a recipe from whatever a build function returned."""
    if isinstance(result, Job):
        return result, Recipe()
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], Job)
        and isinstance(result[1], Recipe)
    ):
        return result
    parts = _parts(result, name=name)
    recipe = parts.pop("recipe", None) or Recipe()
    sizes = parts.pop("sizes", None)
    called = parts.pop("name", None) or name
    if unknown := sorted(set(parts) - set(PARTS)):
        raise BadInput(
            f"{name} returned {', '.join(unknown)}, none of {', '.join(PARTS)}, sizes, recipe, name"
        )
    for part in ("model", "batch"):
        if parts.get(part) is None:
            raise BadInput(f"{name} returned no {part}", hint=RETURNED)
    job = _job_of_parts(parts, name=str(called))
    return (dataclasses.replace(job, sizes=dict(sizes)) if sizes is not None else job), recipe


def _parts(result: Any, *, name: str) -> dict[str, Any]:
    if isinstance(result, Mapping):
        parts = dict(result)
    elif hasattr(result, "_asdict"):
        parts = result._asdict()
    elif isinstance(result, tuple) and 2 <= len(result) <= len(PARTS):
        parts = dict(zip(PARTS, result, strict=False))
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        parts = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    elif type(result).__name__ == "SimpleNamespace":
        parts = dict(vars(result))
    else:
        shown = "None" if result is None else type(result).__name__
        if isinstance(result, tuple):
            shown = f"{len(result)} values"
        raise BadInput(f"{name} returned {shown}", hint=RETURNED)
    return {SPELLINGS.get(key, key): value for key, value in parts.items()}


def _job_of_parts(parts: Mapping[str, Any], *, name: str) -> Job:
    from torch import nn

    model, loss = parts["model"], parts.get("loss")
    given = model if isinstance(model, nn.Module) else None
    if given is None and not callable(model):
        raise BadInput(f"{name} returned a model of type {type(model).__name__}", hint=RETURNED)
    if loss is not None and not callable(loss):
        raise BadInput(
            f"{name} returned a loss of type {type(loss).__name__}", hint="give loss(model, batch) -> scalar"
        )
    make_batch, sizes = maker_of(parts["batch"])
    optimizer = parts.get("optimizer")
    if given is not None:
        return job_of_model(
            given, make_batch=make_batch, sizes=sizes, optimizer=optimizer, loss=loss, name=name
        )
    return Job(
        name=name,
        make_model=model,
        make_batch=make_batch,
        loss=loss or own_loss,
        make_optimizer=optimizer_maker(optimizer, model=None),
        sizes=sizes,
    )


def _with_sizes(job: Job, sizes: Mapping[str, int]) -> Job:
    if unknown := sorted(set(sizes) - set(job.sizes)):
        raise BadInput(f"{job.name} has no {', '.join(unknown)}; its sizes are {', '.join(job.sizes)}")
    return dataclasses.replace(job, sizes={**job.sizes, **sizes}) if sizes else job


def _check_batch(job: Job, *, name: str) -> None:
    """Make one batch, so that a maker that wants a GPU or other sizes is refused early."""
    from flatout.memory.jobs.batch_without_data import make_batch

    with calling(f"the batch maker of {name}"):
        batch = make_batch(job, job.sizes)
    tensors = list(tensors_of(batch))
    if not tensors:
        raise BadInput(
            f"the batch maker of {name} returned {type(batch).__name__}, which holds no tensor",
            hint="return tensors in a dict, list or tuple",
        )
    elsewhere = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
    if elsewhere:
        raise BadInput(
            f"the batch maker of {name} returned tensors on {', '.join(elsewhere)}",
            hint="make them on the CPU; Flatout places them",
        )


def _find_named(name: str) -> Any:
    """Return the object behind `pkg.module:attribute` or `path/to/file.py:attribute`."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py") and attribute:
        return attribute_of(_file_module(Path(place)), attribute, place=place)
    return import_named(name, what="model", form=FORMS, where=WHERE)


def _file_module(path: Path) -> ModuleType:
    """Import a file as a module, with its folder importable as for `python path/to/file.py`."""
    import cloudpickle

    path = path.resolve()
    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    make_importable(str(path.parent))
    module = import_file(path, name=f"flatout_job_{path.stem}_{zlib.crc32(str(path).encode()):08x}")
    cloudpickle.register_pickle_by_value(module)  # no other process could import it by this name
    return module
