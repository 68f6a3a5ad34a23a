"""The router learns whose row it is from features that are computed once; its best weights are calibrated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.assembly import weights_under
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.fused_step import StepSettings
from flatout.engines.adapters.training.phase2_router import (
    RouterOptimizer,
    judge_router,
    log_shares,
    router_losses,
    routing_rows,
    train_router,
)
from flatout.ground.errors import BadInput
from tests.support.adapters import generated, opened, phase_run, save_tiny


@pytest.fixture
def assembly(tmp_path: Path) -> Iterator[Any]:
    model = save_tiny(tmp_path / "tiny")
    with opened(model, tmp_path / "run", phase2={"epochs": 12, "rows": 16, "lr": 0.01}) as made:
        yield made


def test_it_learns_and_nothing_else_moves(assembly: Any) -> None:
    before = {name: value.clone() for name, value in assembly.weights().items()}
    held_out = routing_rows(assembly, "validation")
    lines: list[str] = []
    run = phase_run(assembly, "phase2", steps=1, lines=lines)
    train_router(run)
    assert run.steps == 12 * 5
    assembly.load_weights(run.best)
    accuracy = judge_router(assembly.router, held_out)["accuracy"]
    assert accuracy is not None and accuracy > 80  # chance is 50
    moved = {
        name.split("/")[0] for name, value in assembly.weights().items() if not value.equal(before[name])
    }
    assert moved == {"router"}
    assert any(f"routing {accuracy:.1f} %" in line for line in lines)
    assert not assembly.router.calibration.equal(torch.tensor([1.0, 1.0, 0.0, 0.0]))


def test_the_encoder_is_asked_once(assembly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training for twelve epochs runs every row through the encoder one time, and another run none."""
    rows: list[int] = []
    depths = PackedEncoder.depths

    def counted(self: Any, block: Any) -> Any:
        rows.append(block.num_rows)
        return depths(self, block)

    monkeypatch.setattr(PackedEncoder, "depths", counted)
    train_router(phase_run(assembly, "phase2", steps=1))
    assert sum(rows) == 2 * (40 + 8)
    again = assembly.features(assembly.rows("sentiment", "train").examples)
    assert sum(rows) == 2 * (40 + 8) and again.shape == (40, 64)


def test_a_row_is_set_against_its_own_task_only(assembly: Any) -> None:
    found = routing_rows(assembly, "train")
    assert found.features.shape == (80, 64)
    assert found.tasks.tolist() == [0] * 40 + [1] * 40


def test_shares_are_those_of_the_rows() -> None:
    found = log_shares(torch.tensor([0, 0, 0, 2]), num_tasks=3)
    assert found.exp().tolist() == pytest.approx([0.75, 0.125, 0.25])


def test_tasks_count_alike_unless_rows_shall(tmp_path: Path) -> None:
    """After the same epoch on 40 rows of one task and 10 of another, only the choice between them differs."""
    model = save_tiny(tmp_path / "tiny")
    tasks = {
        "sentiment": {"rank": 2, "data": generated(train=40)},
        "translation": {"rank": 3, "data": generated(train=10), "settings": {"max_target_length": 32}},
    }
    best = {}
    for equal in ("tasks", "rows"):
        phase = {"epochs": 1, "rows": 16, "equal": equal}
        with opened(model, tmp_path / equal, tasks=tasks, phase2=phase) as assembly:
            run = phase_run(assembly, "phase2", steps=1)
            train_router(run)
            best[equal] = weights_under(run.best, "router")
    differ = {name for name, value in best["rows"].items() if not value.equal(best["tasks"][name])}
    assert differ == {"tasks.bias", "calibration"}
    gained = best["tasks"]["tasks.bias"] - best["rows"]["tasks.bias"]
    factor, temperature = best["tasks"]["calibration"][0], best["tasks"]["temperature"]
    wanted = -torch.tensor([40 / 50, 10 / 50]).log() * temperature / factor
    assert torch.allclose(gained, wanted, atol=1e-4)


def test_losses_take_weights_from_the_config() -> None:
    assert router_losses({"balance": 0.0}).balance == 0.0
    assert router_losses({}).router == 2.0
    with pytest.raises(BadInput, match=r"losses sets 'ballance', .*did you mean balance"):
        router_losses({"ballance": 1.0})


def test_the_optimizer_goes_on_bit_for_bit() -> None:
    def trained(steps: list[int], model: Any, optimizer: RouterOptimizer) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(3, 2)).square().sum().backward()
            optimizer.update(step)

    settings = StepSettings(lr=0.1, num_steps=6)
    torch.manual_seed(0)
    whole, broken = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    broken.load_state_dict(whole.state_dict())
    trained([0, 1, 2, 3, 4, 5], whole, RouterOptimizer(whole, settings))
    first = RouterOptimizer(broken, settings)
    trained([0, 1, 2], broken, first)
    second = RouterOptimizer(broken, settings)
    second.load_state(*first.state())
    trained([3, 4, 5], broken, second)
    assert broken.weight.equal(whole.weight) and settings.rate_at(6) == 0.0
