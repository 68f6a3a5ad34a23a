"""A run as files that need no Flatout: adapters, heads and the router.

    NAME/adapter_config.json, adapter_model.safetensors    the adapter, as PEFT loads it
    NAME/head.safetensors, head.json                       its head; labels or units, the longest text
    router.safetensors, router.json                        the router; its tasks, in the order of its outputs
    decoder.safetensors                                    what the heads of tasks that write share

A network of linear layers with GELU between is written as layers.0, layers.1, ...: a loop over them computes
it.  What a loop could not do is folded into the weights: the router's norm has no weights left, and its
outputs are the calibrated logits.  Any other head keeps the names of its own weights.  `docs/adapters.md` has
the lines that load all this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engines.adapters import peft_format
from flatout.engines.adapters.assembly import AdapterAssembly, TaskPart
from flatout.engines.adapters.routing.features import depths_of
from flatout.engines.adapters.routing.router import Router
from flatout.ground.atomic_files import write_whole
from flatout.ground.errors import BadInput, import_extra

HEAD, ROUTER, DECODER = "head", "router", "decoder"
OF_LOOP = (nn.Linear, nn.GELU, nn.Dropout)


def export_run(
    assembly: AdapterAssembly, *, to: Path, run: Path, tasks: Sequence[str] | None = None, routed: bool
) -> list[Path]:
    """Write the adapters and heads of `tasks` (all), and with all of them the router; return the folders.

    A folder with an export of another run is refused, and nothing is written.
    """
    check_target(to, run=run)
    names = list(tasks or assembly.names)
    for name in names:
        assembly.bank.number(name)  # refuses an unknown name before anything is written
    for name in names:
        peft_format.export(assembly.bank, name, to / name, base_model_name=assembly.settings.model, run=run)
        part = assembly.parts[name]
        _write(to / name / HEAD, loop_weights(part.head) or _own_weights(part.head), _said_of(part))
    if assembly.decoder is not None and any(assembly.parts[name].task.needs_decoder for name in names):
        _write(to / DECODER, _own_weights(assembly.decoder))
    if routed and len(names) == len(assembly.names):
        config: Any = assembly.model.config
        depths = depths_of(config.num_hidden_layers + 1)
        said = {"tasks": list(assembly.names), "depths": depths, "run": str(run.resolve())}
        _write(to / ROUTER, router_weights(assembly.router), said)
    return [to / name for name in names]


def check_target(to: Path, *, run: Path) -> None:
    """BadInput where `to` holds an export that is not known to be of this run: nothing replaces it."""
    peft_format.check_target(to, run=run)
    owner = peft_format.run_of(to / f"{ROUTER}.json")
    if (to / f"{ROUTER}.json").exists() and owner != str(run.resolve()):
        raise BadInput(
            f"{to} holds the router of {owner or 'an unknown run'}", hint="choose another --to, or remove it"
        )


def loop_weights(module: nn.Module) -> dict[str, Tensor] | None:
    """The weights of linear layers with GELU between, numbered; None for any other module."""
    leaves = [each for each in module.modules() if not list(each.children())]
    linears = [each for each in leaves if isinstance(each, nn.Linear)]
    between = [each for each in leaves if not isinstance(each, nn.Dropout)][1::2]
    plain = all(isinstance(each, OF_LOOP) for each in leaves) and all(
        isinstance(each, nn.GELU) for each in between
    )
    held = sum(value.numel() for value in module.state_dict().values())
    found = _numbered([(each.weight, each.bias) for each in linears])
    return found if plain and held == sum(value.numel() for value in found.values()) else None


def router_weights(router: Router) -> dict[str, Tensor]:
    """The router as a loop over linear layers: of a normalised feature, to calibrated logits."""
    norm = router.trunk[0]
    assert isinstance(norm, nn.LayerNorm)
    layers: list[tuple[Tensor, Tensor]] = [
        (each.weight, each.bias) for each in router.trunk if isinstance(each, nn.Linear)
    ]
    scale = router.logit_scale()
    layers.append((router.tasks.weight * scale, router.tasks.bias * scale))
    weight, bias = layers[0]
    layers[0] = (weight * norm.weight, bias + weight @ norm.bias)
    return _numbered(layers)


def _numbered(layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for number, (weight, bias) in enumerate(layers):
        found[f"layers.{number}.weight"], found[f"layers.{number}.bias"] = weight, bias
    return {name: value.detach().float().cpu().contiguous() for name, value in found.items()}


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}


def _said_of(part: TaskPart) -> dict[str, Any]:
    task = part.task
    decided = {name: getattr(task, name) for name in ("labels", *task.from_rows) if hasattr(task, name)}
    return {
        "kind": task.name,
        "inputs": list(task.inputs),
        "max_length": part.max_length,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in decided.items()},
    }


@torch.no_grad()
def _write(path: Path, tensors: dict[str, Tensor], said: Mapping[str, Any] | None = None) -> None:
    safetensors = import_extra("safetensors.torch", extra="adapters")
    write_whole(path.with_suffix(".safetensors"), safetensors.save(tensors, metadata={"format": "pt"}))
    if said is not None:
        write_whole(path.with_suffix(".json"), (json.dumps(said, indent=2) + "\n").encode())
