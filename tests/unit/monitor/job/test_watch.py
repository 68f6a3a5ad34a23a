"""`flatout.watch` as a job uses it: loops, steps of its own, epochs, ranks, and no place to write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.runs import CHANNEL_FILE, list_runs, read_run, show_state, state_of
from flatout.monitor.job.channel import JobRecord, read_channel
from flatout.monitor.job.watch import Watch, end_watching, watch
from flatout.monitor.past.history import read_tier
from flatout.monitor.sample import Sample


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    end_watching()


def reported(folder: Path | None) -> JobRecord:
    assert folder is not None
    found = read_channel(folder / CHANNEL_FILE)
    assert found is not None
    return found


def quiet(iterable: object, folder: Path) -> Watch[int]:
    return watch(iterable, line=False, folder=folder)  # type: ignore[arg-type]


def test_a_loop_is_a_step_per_batch_and_gives_the_batches_unchanged(tmp_path: Path) -> None:
    with quiet(range(7), tmp_path) as watched:
        assert len(watched) == 7
        assert list(watched) == list(range(7))
    found = reported(watched.folder)
    assert (found.steps, found.ended, found.sees_data) == (7, True, True)


def test_steps_that_the_job_counts_replace_the_count_of_batches(tmp_path: Path) -> None:
    with quiet(range(12), tmp_path) as watched:
        for number in watched:
            if number % 4 == 3:  # gradients are accumulated over four batches
                watched.step(loss=1.0 / number, lr=0.1, samples=8)
    found = reported(watched.folder)
    assert (found.steps, found.samples, found.learning_rate) == (3, 24, 0.1)
    assert found.loss == pytest.approx(1 / 11)


def test_epochs_join_one_run(tmp_path: Path) -> None:
    for _ in range(3):
        assert sum(quiet(range(5), tmp_path)) == 10
    end_watching()
    ((folder, run),) = list_runs(tmp_path)
    assert reported(folder).steps == 15
    assert state_of(run) == "ended"


def test_a_with_block_per_epoch_is_one_run(tmp_path: Path) -> None:
    heard: list[Sample] = []
    for _ in range(3):
        with watch(range(5), line=False, folder=tmp_path, hz=10, listeners=[heard.append]) as watched:
            for _ in watched:
                watched.step(loss=1.0)
            count = len(heard)
            while len(heard) == count:
                pass
        ((folder, run),) = list_runs(tmp_path)
        assert state_of(run) == "ended"
    assert reported(folder).steps == 15
    assert reported(folder).ended
    assert {sample.job.steps for sample in heard if sample.job is not None} <= {None, *range(16)}
    assert not [note for sample in heard for note in sample.notes]
    end_watching()
    assert len(list(read_tier(folder, "raw"))) == len(heard)
    assert list(read_tier(folder, "minutes"))


def test_a_watch_that_is_entered_again_goes_on(tmp_path: Path) -> None:
    watched = quiet(range(3), tmp_path)
    for epoch in range(3):
        with watched:
            list(watched)
            assert state_of(list_runs(tmp_path)[0][1]) == "running"
        assert reported(watched.folder).steps == 3 * (epoch + 1)
    ((_, run),) = list_runs(tmp_path)
    assert state_of(run) == "ended"


def test_with_blocks_of_different_names_are_different_runs(tmp_path: Path) -> None:
    for name in ("train", "test", "test"):
        with watch(range(2), line=False, folder=tmp_path, name=name) as watched:
            list(watched)
    end_watching()
    assert sorted(run.name for _, run in list_runs(tmp_path)) == ["test", "train"]
    assert {state_of(run) for _, run in list_runs(tmp_path)} == {"ended"}


def test_a_loop_that_is_left_early_and_one_that_raises_go_on_as_they_would(tmp_path: Path) -> None:
    for number in quiet(range(100), tmp_path):
        if number == 3:
            break

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        list(quiet(failing(), tmp_path))
    end_watching()
    ((folder, _),) = list_runs(tmp_path)
    assert reported(folder).steps == 4


def test_phases_that_the_job_names_are_timed(tmp_path: Path) -> None:
    with quiet(range(3), tmp_path) as watched:
        for _ in watched:
            with watched.phase("forward"), watched.phase("transfer"):
                sum(range(1000))
        with pytest.raises(BadInput, match="no phase 'dream'"):
            watched.phase("dream")
    found = reported(watched.folder)
    assert found.host_s["transfer"] > 0
    assert found.host_s["forward"] > 0


def test_a_watch_without_a_loader_counts_steps_and_cannot_be_iterated(tmp_path: Path) -> None:
    watched: Watch[int] = watch(line=False, folder=tmp_path)
    for _ in range(5):
        watched.step()
    with pytest.raises(BadInput, match="nothing to iterate"):
        list(watched)
    end_watching()
    found = reported(watched.folder)
    assert (found.steps, found.sees_data) == (5, False)


def test_listeners_and_the_log_get_every_sample(tmp_path: Path) -> None:
    heard: list[Sample] = []
    with watch(range(3), line=False, folder=tmp_path, hz=10, listeners=[heard.append]) as watched:
        list(watched)
        while not heard:
            pass
    assert watched.folder is not None
    logged = list(read_tier(watched.folder, "raw"))
    assert [round(one.time_s, 3) for one in heard] == [one.time_s for one in logged]
    assert heard[0].job is not None
    assert heard[0].job.pid == os.getpid()


def test_a_listener_that_raises_is_told_about_and_the_log_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Sample] = []

    def broken(sample: Sample) -> None:
        raise ZeroDivisionError("no steps yet")

    with watch(range(3), line=False, folder=tmp_path, hz=10, listeners=[broken, heard.append]) as watched:
        list(watched)
        while len(heard) < 3:
            pass
    assert watched.folder is not None
    assert len(list(read_tier(watched.folder, "raw"))) >= 3
    said = capsys.readouterr().err
    assert said.count("broken failed: ZeroDivisionError: no steps yet") == 1
    assert said.count("\n") == 1


@pytest.mark.parametrize(("rank", "has_log"), [("0", True), ("1", False)])
def test_of_several_ranks_the_first_keeps_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, has_log: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with quiet(range(3), tmp_path) as watched:
        list(watched)
        assert watched.run is not None
        assert (watched.run.sampler is not None) == has_log
    assert watched.folder is not None
    assert reported(watched.folder).steps == 3
    assert read_run(watched.folder).rank == int(rank)


def test_a_job_with_no_place_to_write_runs_unwatched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    watched = quiet(range(4), blocked)
    assert list(watched) == [0, 1, 2, 3]
    watched.step(loss=1.0)
    with watched.phase("forward"), watched:
        pass
    assert (watched.folder, watched.latest) == (None, None)
    assert "is not watched" in capsys.readouterr().err


def test_a_script_ends_its_run_and_its_line_when_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from flatout.monitor.job.watch import watch\n"
        "for batch in watch(range(5), folder=pathlib.Path(sys.argv[1]), name='x', hz=10): pass\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    ((folder, run),) = list_runs(tmp_path)
    assert (run.name, state_of(run)) == ("x", "ended")
    assert reported(folder).steps == 5


def test_a_killed_script_leaves_a_run_that_died(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, signal\n"
        "from flatout.monitor.job.watch import watch\n"
        "for batch in watch(range(500), folder=pathlib.Path(sys.argv[1]), line=False):\n"
        "    if batch == 400: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    ((folder, run),) = list_runs(tmp_path)
    assert state_of(run) == "died"
    assert reported(folder).steps <= 400


@pytest.mark.parametrize(
    ("line", "shown", "code"),
    [("pass", "ended", None), ("raise ValueError('no rows')", "failed: ValueError: no rows", 1)],
)
def test_a_script_that_fails_does_not_read_like_one_that_ends(
    tmp_path: Path, line: str, shown: str, code: int | None
) -> None:
    script = (
        "import sys, pathlib\n"
        "from flatout.monitor.job.watch import watch\n"
        "for batch in watch(range(5), folder=pathlib.Path(sys.argv[1]), line=False): pass\n"
    )
    subprocess.run([sys.executable, "-c", script + line, str(tmp_path)], capture_output=True, check=False)
    ((_, run),) = list_runs(tmp_path)
    assert (show_state(run), run.exit_code) == (shown, code)


def test_a_with_block_that_raises_is_a_run_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), quiet(range(2), tmp_path):
        raise ZeroDivisionError("by zero")
    ((_, run),) = list_runs(tmp_path)
    assert show_state(run) == "failed: ZeroDivisionError: by zero"
    with quiet(range(2), tmp_path) as watched:
        list(watched)
    ((_, run),) = list_runs(tmp_path)
    assert show_state(run) == "finished"
