"""At the border of a step: reports, checkpoints and stops, each where it is due."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.engines.adapters.training.phase import LossWindow, PhaseRun, check_share
from flatout.engines.adapters.training.records import KIND, StepRecord
from flatout.engines.run.log import RunLog, read_records
from flatout.engines.run.ranks import Ranks
from flatout.ground.errors import BadInput, ChildDied, Interrupted
from tests.support.adapters import opened, phase_run, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def assembly(model: Path, tmp_path: Path) -> Iterator[Any]:
    with opened(model, tmp_path / "run", log_every=2, checkpoint_every=3) as made:
        yield made


def advance(run: PhaseRun, *, last: bool = False) -> None:
    run.window.add(("sentiment",), torch.tensor([float(run.step)]), tokens=10)
    run.step += 1
    run.end_step(learning_rates={"sentiment": 0.1}, last=last)


def test_a_window_holds_means_until_it_is_read() -> None:
    window = LossWindow()
    for value in (1.0, 2.0):
        window.add(("a",), torch.tensor([value], requires_grad=True), tokens=5)
    for value in (6.0, 7.0):
        window.add(("a", "b"), torch.tensor([value, value - 2]), tokens=5)
    losses, seconds = window.means()
    assert losses == {"a": 4.0, "b": 4.5} and seconds > 0 and window.tokens == 20


def test_reports_and_checkpoints_come_when_they_are_due(assembly: Any) -> None:
    lines: list[str] = []
    run = phase_run(assembly, "phase1", steps=7, lines=lines)
    for _ in range(7):
        advance(run, last=run.step == 6)
    assert [line.split(" | ")[0] for line in lines] == [f"phase1 {step}/7" for step in (2, 4, 6, 7)]
    assert "loss 0.5 | lr 0.1" in lines[0] and "loss 2.5" in lines[1]
    kept = [path.name for path in run.checkpoints.paths()]
    assert kept == ["step-000006", "step-000007"]
    assert run.checkpoints.read_state(run.checkpoints.folder / "step-000007").finished
    assert not run.checkpoints.read_state(run.checkpoints.folder / "step-000006").finished


def test_a_request_to_stop_keeps_the_step_it_finds(assembly: Any) -> None:
    run = phase_run(assembly, "phase1", steps=7)
    advance(run)
    run._stop._take(signal.SIGINT, None)
    with pytest.raises(Interrupted, match="step 2 of 7 of phase1 is kept") as caught:
        advance(run)
    assert caught.value.hint == "continue with --resume"
    found = run.checkpoints.latest()
    assert found is not None and (found.state.step, found.state.finished) == (2, False)


@pytest.mark.parametrize(
    ("first", "is_deputy", "keeps"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_lost_process_leaves_the_step_before(
    first: bool, is_deputy: bool, keeps: bool, assembly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = phase_run(assembly, "phase1", steps=7)
    advance(run)
    monkeypatch.setattr(assembly, "ranks", SimpleNamespace(first=first, is_deputy=is_deputy))
    with pytest.raises(ChildDied, match="gone"), run.stepping():
        raise ChildDied("gone")
    found = run.checkpoints.latest()
    assert (found is not None) == keeps and (found is None or found.state.step == 1)


def test_who_is_left_writes_the_report_that_the_first_did_not_come_to_write(
    assembly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = assembly.settings.folder
    run = phase_run(assembly, "phase1", steps=7)
    monkeypatch.setattr(assembly, "ranks", Ranks(device=torch.device("cpu"), rank=1, num_ranks=2))
    for _ in range(4):
        advance(run)
    with RunLog(out, KIND) as first:
        first.write(StepRecord(phase="phase1", step=2))
        first._file.write(b'{"phase": "phase1", "st')  # it was killed here
    for _ in range(2):
        with pytest.raises(ChildDied, match="gone"), run.stepping():
            raise ChildDied("gone")
    assert [record.step for record in read_records(out, KIND)] == [2, 4]
    (kept,) = run.checkpoints.paths()
    assert kept.name == "step-000004"


def test_what_cannot_be_shared_evenly_is_said_with_what_can() -> None:
    of_two: Any = SimpleNamespace(ranks=Ranks(device=torch.device("cpu"), rank=0, num_ranks=2))
    check_share(of_two, 4, phase="phase1")
    with pytest.raises(BadInput, match=r"phase3.accumulate=3 .* 2 processes .*phase3.accumulate=4"):
        check_share(of_two, 3, phase="phase3")


def test_the_best_weights_are_those_of_their_step(assembly: Any) -> None:
    run = phase_run(assembly, "phase1", steps=7)
    run.step = 1
    assert run.record_scores(("sentiment",), score=1.0, scores={"sentiment": {"accuracy": 1.0}}, patience=2)
    run.keep_best(assembly.weights(only=("sentiment",)))
    name = next(name for name in run.best if name.startswith("heads/sentiment"))
    before = run.best[name].clone()
    assembly.parts["sentiment"].head.layers[0].weight.data.add_(1.0)
    run.step = 2
    assert not run.record_scores(("sentiment",), score=0.5, scores={}, patience=2)
    assert run.best[name].equal(before)
    run.save(finished=False)
    found = run.checkpoints.latest()
    assert found is not None
    assert found.tensors("best")[name].equal(before)
    assert not found.tensors("training")[f"weights/{name}"].equal(before)


def test_another_models_checkpoint_is_refused(assembly: Any, tmp_path: Path) -> None:
    run = phase_run(assembly, "phase1", steps=7)
    run.save(finished=False)
    found = run.checkpoints.latest()
    other = opened(save_tiny(tmp_path / "other", seed=1), tmp_path / "run", log_every=2, checkpoint_every=3)
    with other, pytest.raises(BadInput, match="belongs to a model other"):
        PhaseRun(
            other,
            phase="phase1",
            steps=7,
            found=found,
            log=None,
            live=run._live,
            stop=run._stop,
            on_line=print,
            on_progress=print,
        )


def test_other_threads_are_said(assembly: Any) -> None:
    run = phase_run(assembly, "phase1", steps=7)
    run.save(finished=False)
    found = run.checkpoints.latest()
    notes: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        PhaseRun(
            assembly,
            phase="phase1",
            steps=7,
            found=found,
            log=None,
            live=run._live,
            stop=run._stop,
            on_line=notes.append,
            on_progress=notes.append,
        )
    finally:
        torch.set_num_threads(threads)
    assert f"the run had {threads} threads and has {threads + 1} here" in notes[0]
