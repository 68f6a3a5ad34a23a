"""What is exported computes what the run computes, and nothing of another run is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from flatout.engines.adapters.export_run import check_target, export_run, loop_weights, router_weights
from flatout.engines.adapters.routing.router import Router
from flatout.engines.adapters.tasks.kinds.classification import PooledHead
from flatout.ground.errors import BadInput
from tests.support.adapters import generated, opened, save_tiny


def loop(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """As the docs have it."""
    for number in range(len(weights) // 2):
        name = f"layers.{number}"
        x = linear(gelu(x) if number else x, weights[f"{name}.weight"], weights[f"{name}.bias"])
    return x


def test_a_head_is_a_loop_over_its_layers() -> None:
    head = PooledHead(8, num_outputs=3).eval()
    states = torch.randn(4, 1, 8)
    weights = loop_weights(head)
    assert weights is not None and set(weights) == {
        f"layers.{number}.{part}" for number in (0, 1) for part in ("weight", "bias")
    }
    torch.testing.assert_close(loop(states[:, 0], weights), head(states, torch.ones(4, dtype=torch.long)))
    single = nn.Linear(8, 2)
    torch.testing.assert_close(loop(states[:, 0], loop_weights(single) or {}), single(states[:, 0]))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        nn.LayerNorm(4),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    ],
)
def test_what_is_not_such_a_loop_keeps_its_own_names(module: nn.Module) -> None:
    assert loop_weights(module) is None


def test_the_router_is_a_loop_with_its_norm_and_calibration_folded_in() -> None:
    torch.manual_seed(0)
    router = Router(12, num_tasks=3, hidden=(8, 6), temperature=2.0).eval()
    with torch.no_grad():
        for parameter in router.trunk.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        router.calibration.copy_(torch.tensor([1.7, 1.0, 0.5, 0.1]))
    features = 3 + 2 * torch.randn(20, 12)
    logits = loop(layer_norm(features, [12]), router_weights(router))
    torch.testing.assert_close(logits.softmax(-1), router.route(features).probabilities)


def test_a_run_is_written_whole_and_another_run_is_not_replaced(tmp_path: Path) -> None:
    model, to = save_tiny(tmp_path / "model"), tmp_path / "exported"
    tasks = {
        "topics": {"kind": "classification", "settings": {"labels": ["a", "b"]}, "data": generated()},
        "translation": {"rank": 3, "data": generated(), "settings": {"max_target_length": 32}},
    }

    def files() -> set[str]:
        return {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}

    with opened(model, tmp_path / "run", tasks=tasks) as assembly:
        export_run(assembly, to=to, run=tmp_path / "run", tasks=["topics"], routed=True)
        assert {path.rpartition("/")[0] for path in files()} == {
            "topics"
        }  # no router without all of its tasks
        folders = export_run(assembly, to=to, run=tmp_path / "run", routed=True)
    assert [folder.name for folder in folders] == ["topics", "translation"]
    assert {"router.safetensors", "router.json", "decoder.safetensors"} < files()
    head: dict[str, Any] = json.loads((to / "topics" / "head.json").read_text())
    assert head == {
        "kind": "classification", "inputs": ["text"], "max_length": 96, "labels": ["a", "b"]
    }  # fmt: skip
    assert load_file(to / "topics" / "head.safetensors")["layers.1.bias"].shape == (2,)
    assert json.loads((to / "router.json").read_text())["tasks"] == ["topics", "translation"]
    check_target(to, run=tmp_path / "run")
    with pytest.raises(BadInput, match="holds an adapter of"):
        check_target(to, run=tmp_path / "other")
    for folder in folders:
        (folder / "adapter_config.json").unlink()
    with pytest.raises(BadInput, match="holds the router of"):
        check_target(to, run=tmp_path / "other")
