"""Every adapter learns by its own settings; one that no longer gets better leaves with its best weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.training import phase1_adapters
from flatout.engines.adapters.training.phase1_adapters import (
    decoder_groups,
    make_optimizer,
    steps_of,
    train_adapters,
)
from flatout.engines.adapters.training.validation import HeldOutScores, Validation
from tests.support.adapters import generated, opened, phase_run, save_tiny, tiny_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def assembly(model: Path, tmp_path: Path) -> Iterator[Any]:
    with opened(model, tmp_path / "run") as made:
        yield made


def test_every_factor_of_every_adapter_learns_and_changes_the_output(assembly: Any) -> None:
    before = {name: value.clone() for name, value in assembly.weights().items()}
    batch = assembly.parts["sentiment"].task.collate(
        assembly.rows("sentiment", "test").examples, adapter=0, pad_id=assembly.pad_id
    )
    with torch.no_grad():
        (plain,) = assembly.encoder((batch.block,), adapters=False)
    frozen = {name: value.clone() for name, value in assembly.model.named_parameters()}
    run = phase_run(assembly, "phase1", steps=6)
    train_adapters(run)
    after = assembly.weights()
    still = [name for name, value in after.items() if value.equal(before[name])]
    assert all(name.startswith("router/") for name in still), still
    assert any(name.endswith("lora_A.weight") for name in after)
    with torch.no_grad():
        (adapted,) = assembly.encoder((batch.block,))
    assert not torch.allclose(adapted, plain, atol=1e-4)
    assert all(value.equal(frozen[name]) for name, value in assembly.model.named_parameters())


def test_it_learns(model: Path, tmp_path: Path) -> None:
    given = tiny_settings(model, tmp_path)["phase1"]
    phase = {**given, "steps": 60, "lr": 0.02, "accumulate": 1, "evaluate_every": 60}
    with opened(model, tmp_path / "run", phase1=phase, log_every=10, checkpoint_every=60) as assembly:
        validation = Validation(assembly, rows=8)
        before = {name: validation.judge(name).loss for name in assembly.names}
        train_adapters(phase_run(assembly, "phase1", steps=60))
        after = {name: validation.judge(name).loss for name in assembly.names}
    assert after["translation"] < 0.8 * before["translation"]
    assert after["sentiment"] < before["sentiment"]


def test_an_adapter_that_no_longer_gets_better_leaves_with_its_best_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentiment is told that it got worse after the first look; translation that it gets better each time."""
    scores = {
        "sentiment": iter([90.0, 80.0, 70.0]),
        "translation": iter([10.0, 20.0, 30.0, 40.0, 50.0, 60.0]),
    }

    class Scripted(Validation):
        def judge(self, name: str, **given: Any) -> HeldOutScores:
            metric = {"sentiment": "accuracy", "translation": "token_accuracy"}[name]
            return HeldOutScores(scores={metric: next(scores[name])}, loss=1.0)

    monkeypatch.setattr(phase1_adapters, "Validation", Scripted)
    tasks = tiny_settings(model, tmp_path)["tasks"]
    tasks["sentiment"]["patience"] = 2
    phase = {**tiny_settings(model, tmp_path)["phase1"], "evaluate_every": 1}
    shapes: list[int] = []
    step = phase1_adapters.FusedStep.__call__

    def counted(self: Any, batches: Any) -> Any:
        shapes.append(len(batches))
        return step(self, batches)

    monkeypatch.setattr(phase1_adapters.FusedStep, "__call__", counted)
    with opened(model, tmp_path / "run", tasks=tasks, phase1=phase) as assembly:
        notes: list[str] = []
        run = phase_run(assembly, "phase1", steps=6, lines=notes)
        seen: list[torch.Tensor] = []
        keep_best = run.keep_best

        def watched(weights: Any) -> None:
            keep_best(weights)
            seen.append(run.best["heads/sentiment/layers.0.weight"].clone())

        run.keep_best = watched
        train_adapters(run)
        assert run.step == 6
        assert run.progress["sentiment"].done == 3 and run.progress["sentiment"].best_step == 1
        assert run.progress["translation"].done == 6 and run.progress["translation"].best_step == 6
        # Two batches a step: three steps with both blocks, three with one.
        assert shapes == [2] * 6 + [1] * 6
        best = run.best["heads/sentiment/layers.0.weight"]
        assert all(each.equal(best) for each in seen)
        assert not best.equal(assembly.parts["sentiment"].head.layers[0].weight)
        assert "sentiment leaves at step 3; best at step 1" in notes


def test_all_may_leave_before_the_last_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flat(Validation):
        def judge(self, name: str, **given: Any) -> HeldOutScores:
            return HeldOutScores(scores={"accuracy": 1.0, "token_accuracy": 1.0}, loss=1.0)

    monkeypatch.setattr(phase1_adapters, "Validation", Flat)
    given = tiny_settings(model, tmp_path)
    given["tasks"]["sentiment"]["patience"] = 1
    phase = {**given["phase1"], "evaluate_every": 1, "patience": 1}
    with opened(model, tmp_path / "run", tasks=given["tasks"], phase1=phase) as assembly:
        run = phase_run(assembly, "phase1", steps=6)
        train_adapters(run)
        assert run.step == 2
        found = run.checkpoints.latest()
        assert found is not None and found.state.finished and found.state.step == 2


def test_settings_of_a_task_win_over_those_of_the_phase(model: Path, tmp_path: Path) -> None:
    tasks = {
        "sentiment": {"lr": 0.5, "data": generated()},
        "translation": {"data": generated(), "settings": {"max_target_length": 16}},
    }
    with opened(model, tmp_path, tasks=tasks) as assembly:
        optimizer = make_optimizer(assembly)
        assert optimizer.rate("sentiment") == 0.5
        assert optimizer.rate("translation") == 0.001


def test_tasks_that_share_the_decoder_are_judged_together(model: Path, tmp_path: Path) -> None:
    tasks = {name: {"rank": 2} for name in ("translation", "sentiment", "summarisation", "qa")}
    with opened(model, tmp_path, tasks=tasks) as assembly:
        assert decoder_groups(assembly) == [("sentiment",), ("qa",), ("translation", "summarisation")]


def test_a_task_may_have_fewer_steps_and_leaves_at_the_end_of_its_own_schedule(
    model: Path, tmp_path: Path
) -> None:
    tasks = tiny_settings(model, tmp_path)["tasks"]
    tasks["sentiment"]["steps"] = 4
    with opened(model, tmp_path / "run", tasks=tasks) as assembly:
        lines: list[str] = []
        run = phase_run(assembly, "phase1", steps=6, lines=lines)
        train_adapters(run)
        assert run.step == 6
        assert run.progress["sentiment"].done == 4
        assert any(line.startswith("sentiment leaves at step 4") for line in lines)
        optimizer = make_optimizer(assembly)
        assert (steps_of(assembly, "sentiment"), steps_of(assembly, "translation")) == (4, 6)
        assert optimizer.rate("sentiment") == 0.001


def test_an_adapter_whose_loss_stays_no_number_leaves_and_the_others_go_on(
    model: Path, tmp_path: Path
) -> None:
    """Translation and summarisation share the decoder: one of them leaving must not hold the other."""
    settings = tiny_settings(model, tmp_path)
    writing = settings["tasks"]["translation"]
    tasks = {**settings["tasks"], "summarisation": {**writing, "rank": 2}}
    phase = {**settings["phase1"], "accumulate": 1, "steps": 24, "evaluate_every": 4, "patience": 100}
    with opened(model, tmp_path / "run", tasks=tasks, phase1=phase, log_every=50) as assembly:
        lines: list[str] = []
        run = phase_run(assembly, "phase1", steps=24, lines=lines)
        plain = assembly.loss

        def spoilt(adapter: int, states: Any, batch: Any) -> Any:
            loss = plain(adapter, states, batch)
            return loss * float("nan") if assembly.names[adapter] == "summarisation" else loss

        assembly.loss = spoilt
        before = {name: value.clone() for name, value in assembly.weights().items()}
        train_adapters(run)
        assert "summarisation left at step 20: its loss is not a number" in lines
        assert any(line.startswith("phase1 20/24 | ") and "loss nan" not in line for line in lines)
        lost = run.progress["summarisation"]
        assert lost.done == 20 and lost.left_because == "its loss is not a number"
        after = assembly.weights()
        for name in ("sentiment", "translation"):
            assert run.progress[name].done == 24 and run.progress[name].left_because is None
            own = [key for key in after if key.split("/")[1] == name]
            assert own and all(not after[key].equal(before[key]) for key in own)
        assert run.progress["translation"].best_step is not None
        assert all(after[key].equal(before[key]) for key in after if "/summarisation/" in key)
        assert all(value.isfinite().all() for value in run.best.values())
