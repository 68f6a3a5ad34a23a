"""A run as files that need no Flatout: adapters, heads and the router.

    NAME/adapter_config.json, adapter_model.safetensors    the adapter, as PEFT loads it
    NAME/head.safetensors, head.json                       its head; labels or units, the longest text
    router.safetensors, router.json                        the router; its tasks, in the order of its outputs
    decoder.safetensors                                    shared by the heads of tasks that write text

A network of linear layers with GELU between them is written as layers.0, layers.1, ...: a loop over them
computes it.  The router's norm weights and its calibration are folded into the layers, so that its outputs
are calibrated logits.  Any other head keeps the names of its weights.  `docs/adapters.md` has the lines that
load all this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout.engines.adapters import peft_format
from flatout.engines.adapters.assembly import AdapterAssembly, TaskPart
from flatout.engines.adapters.routing.features import depths_of
from flatout.engines.adapters.routing.router import Router
from flatout.engines.run.tensor_files import save_tensors
from flatout.ground.documents import write_json
from flatout.ground.errors import BadInput

HEAD, ROUTER, DECODER = "head", "router", "decoder"
RUN = "flatout_run.json"  # beside an adapter: the run that it was exported from
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
    owner = {"run": str(run.resolve())}
    for name in names:
        write_json(to / name / RUN, owner)
        peft_format.export(assembly.bank, name, to / name, base_model_name=assembly.settings.model)
        part = assembly.parts[name]
        _write(to / name / HEAD, loop_weights(part.head) or part.head.state_dict(), _describe(part))
    if assembly.decoder is not None and any(assembly.parts[name].task.needs_decoder for name in names):
        _write(to / DECODER, assembly.decoder.state_dict())
    if routed and len(names) == len(assembly.names):
        config: Any = assembly.model.config
        depths = depths_of(config.num_hidden_layers + 1)
        said = {"tasks": list(assembly.names), "depths": depths, **owner}
        _write(to / ROUTER, router_weights(assembly.router), said)
    return [to / name for name in names]


def check_target(to: Path, *, run: Path) -> None:
    """Raise BadInput if `to` holds the export of another run: an export replaces only its own."""
    for config in (*to.glob(peft_format.CONFIG), *sorted(to.glob(f"*/{peft_format.CONFIG}"))):
        _check_owner(config.with_name(RUN), run=run, what="an adapter")
    if (to / f"{ROUTER}.json").exists():
        _check_owner(to / f"{ROUTER}.json", run=run, what="the router")


def _check_owner(path: Path, *, run: Path, what: str) -> None:
    """Raise BadInput unless a file names this run as the one its neighbours were exported from."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    owner = found.get("run") if isinstance(found, dict) else None
    if owner != str(run.resolve()):
        raise BadInput(
            f"{path.parent} holds {what} of {owner or 'an unknown run'}",
            hint=f"choose another --to, or remove {path.parent}",
        )


def loop_weights(module: nn.Module) -> dict[str, Tensor] | None:
    """Number the weights of linear layers with GELU between them; None for any other module."""
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
    """Return the router as linear layers that take a normalised feature to calibrated logits."""
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
    return {name: value.detach().float() for name, value in found.items()}


def _describe(part: TaskPart) -> dict[str, Any]:
    task = part.task
    decided = {name: getattr(task, name) for name in ("labels", *task.from_rows) if hasattr(task, name)}
    return {
        "kind": task.name,
        "inputs": list(task.inputs),
        "max_length": part.max_length,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in decided.items()},
    }


def _write(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any] | None = None) -> None:
    file = path.with_suffix(".safetensors")
    save_tensors(file, tensors, extra="adapters", metadata={"format": "pt"})
    if said is not None:
        write_json(path.with_suffix(".json"), said)
