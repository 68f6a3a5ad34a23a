"""The tasks' losses reach the router, fewer and fewer batches are of one task, nothing worse is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.adapters.lora import recorder
from flatout.engines.adapters.settings import PhaseThree
from flatout.engines.adapters.training.phase3_joint import (
    JointStep,
    single_task_share,
    tasks_of_batch,
    train_jointly,
)
from flatout.engines.adapters.training.validation import Validation
from tests.support.adapters import opened, phase_run, save_tiny, tiny_settings

ONLY_TASK = dict.fromkeys(
    ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature"), 0.0
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def joint(model: Path, out: Path, **changes: Any) -> Any:
    phase = {**tiny_settings(model, out)["phase3"], **changes}
    return opened(model, out, phase3=phase)


@pytest.fixture
def assembly(model: Path, tmp_path: Path) -> Iterator[Any]:
    with joint(model, tmp_path / "run") as made:
        yield made


def test_the_share_of_single_task_batches_falls_on_a_straight_line() -> None:
    phase = PhaseThree(steps=101)
    assert single_task_share(phase, step=0) == 0.8
    assert single_task_share(phase, step=50) == pytest.approx(0.5)
    assert single_task_share(phase, step=100) == pytest.approx(0.2)
    names = ("a", "b", "c")
    for step, share in ((0, 0.8), (100, 0.2)):
        drawn = [tasks_of_batch(names, phase, number=number, step=step, seed=0) for number in range(1000)]
        single = [tasks for tasks in drawn if len(tasks) == 1]
        assert len(single) / 1000 == pytest.approx(share, abs=0.05)
        assert {tasks[0] for tasks in single} == set(names)
        assert all(tasks == names for tasks in drawn if len(tasks) > 1)
    assert tasks_of_batch(names, phase, number=5, step=3, seed=0) == tasks_of_batch(
        names, phase, number=5, step=3, seed=0
    )


@pytest.mark.parametrize("noise", ["softmax", "gumbel"])
def test_the_loss_of_the_tasks_alone_moves_the_router(model: Path, tmp_path: Path, noise: str) -> None:
    with joint(model, tmp_path / "run", losses=ONLY_TASK, noise=noise) as assembly:
        for number, spec in enumerate(assembly.bank.specs):  # adapters that do nothing cannot be told apart
            rows = assembly.bank.factors[number, : spec.rank]
            rows.add_(0.1 * torch.randn_like(rows))
        run = phase_run(assembly, "phase3", steps=4)
        step = JointStep(run)
        assembly.router.gumbel = noise == "gumbel"
        assembly.train()
        total, _ = step.losses(step.batches(0, step=0))
        total.backward()
        (found,) = (p.grad for name, p in assembly.router.named_parameters() if name == "tasks.weight")
        assert found is not None and found.abs().sum() > 0
        assert assembly.bank.gradients.abs().sum() > 0


def test_a_step_tells_every_loss_by_its_name_and_is_recorded_only_on_a_gpu(
    model: Path, tmp_path: Path
) -> None:
    """Single-task and mixed batches have other names; a replay knows them without running the losses."""
    with joint(model, tmp_path / "run", single_task_first=1.0, single_task_last=0.0) as assembly:
        run = phase_run(assembly, "phase3", steps=4)
        step = JointStep(run)
        assert str(step.decision) == "eager (computed: CUDA graphs need a GPU)"
        assembly.train()
        step(0)
        step(3)
        kinds = [names[: names.index("router")] for names in run.window._sums]
        assert {len(tasks) for tasks in kinds} == {1, 2} and kinds[-1] == ("sentiment", "translation")
        losses, _ = run.window.means()
        assert {"sentiment", "translation", "router", "consistency", "total"} <= losses.keys()
        assert all(math.isfinite(loss) for loss in losses.values())
        for batch in step.batches(0, step=3):
            assert "features" in recorder.tensors_of(batch), "a replay copies what the router sees"


def test_everything_learns_and_rates_differ_tenfold(assembly: Any) -> None:
    before = {name: value.clone() for name, value in assembly.weights().items()}
    run = phase_run(assembly, "phase3", steps=4)
    train_jointly(run)
    still = {name for name, value in assembly.weights().items() if value.equal(before[name])}
    assert still <= {"router/calibration"}
    optimizer = JointStep(run).optimizer
    assert optimizer.rate("sentiment") == pytest.approx(0.1 * optimizer.rate("shared"))


def test_what_was_there_before_is_judged_first_and_kept_if_nothing_is_better(
    assembly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flatout.engines.adapters.training import phase3_joint
    from flatout.engines.adapters.training.validation import HeldOutScores

    scores = iter([50.0, 50.0, 40.0, 40.0, 30.0, 30.0])

    class Falling(Validation):
        def judge(self, name: str, **given: Any) -> HeldOutScores:
            score = next(scores)
            return HeldOutScores(scores={"accuracy": score, "token_accuracy": score}, loss=1.0)

    monkeypatch.setattr(phase3_joint, "Validation", Falling)
    before = {name: value.clone() for name, value in assembly.weights().items()}
    lines: list[str] = []
    run = phase_run(assembly, "phase3", steps=4, lines=lines)
    train_jointly(run)
    assert run.progress["router"].best_step == 0
    assert any(line.startswith("phase3 0/4") and "sentiment 50.0" in line for line in lines)
    told = "50.00 before it, 30.00 at its end): the weights of phase2 are kept"
    assert sum(told in line for line in lines) == 1
    kept = [name for name in before if name != "router/calibration"]
    assert all(run.best[name].equal(before[name]) for name in kept)


def test_memory_is_that_of_one_batch_however_many_rows(model: Path, tmp_path: Path) -> None:
    """Tokens of a pass stay within the budget of one block per task, in training and in judging."""
    seen: list[int] = []
    with joint(model, tmp_path / "run") as assembly:
        call = type(assembly.encoder).__call__

        def counted(blocks: Any, **given: Any) -> Any:
            seen.append(sum(block.num_tokens for block in blocks))
            return call(assembly.encoder, blocks, **given)

        assembly.encoder = CallsThrough(assembly.encoder, counted)
        train_jointly(phase_run(assembly, "phase3", steps=4))
    assert seen and max(seen) <= max(2 * 256, 1024)


class CallsThrough:
    """An encoder whose calls are seen."""

    def __init__(self, encoder: Any, call: Any) -> None:
        self._encoder, self._call = encoder, call

    def __call__(self, blocks: Any, **given: Any) -> Any:
        return self._call(blocks, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)
