from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.ground.errors import BadInput, FlatoutError, Interrupted, NothingMeasured, ScriptFailed
from flatout.measure.evidence_file import load_evidence, save_evidence
from flatout.measure.run import launch
from flatout.measure.run.lineage import UNFINISHED
from flatout.measure.run.ranks.other_trainers import UNWATCHED
from tests.support import doctor as builders
from tests.support.measure import BY_HAND, diagnose, write_script


def run_job(command: list[str], path: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "module": False,
        "keep_running": False,
        "evidence_path": path,
        "seconds": 1.0,
        "script_stdout_to_stderr": False,
        "on_progress": lambda message: None,
    }
    return launch.run_job(command, **{**options, **changes})


# -- before anything starts


@pytest.mark.parametrize(
    ("command", "module", "message"),
    [
        (["absent.py"], False, "no script at absent.py"),
        (["no_such_module_anywhere.train"], True, "there is no module 'no_such_module_anywhere'"),
    ],
)
def test_what_cannot_run_is_refused(command: list[str], module: bool, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        run_job(command, tmp_path / "e.json", module=module)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["script.py/e.json", "."])
def test_a_place_that_cannot_be_written_is_refused(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write_script(tmp_path / "script.py", "")
    with pytest.raises(BadInput, match=r"cannot be written|is a folder"):
        run_job([str(script)], tmp_path / place)


@pytest.mark.parametrize(("target", "name"), [("pkg/train.py", "train"), ("pkg.train", "pkg.train")])
def test_evidence_goes_beside_the_job(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = launch.default_evidence_path([target, "--lr", "1"])
    assert path.parent == tmp_path / ".flatout"
    assert path.name.startswith(f"{name}-2") and path.suffix == ".json"


# -- how it ended


def ending(code: int, *, interrupted: bool = False) -> Any:
    return launch._End(code=code, interrupted=interrupted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ended": "interrupted"}, Interrupted, "interrupted after 54 measured steps"),
        ({"ended": "crashed", "error": "KeyError: 'x'"}, ScriptFailed, "raised KeyError: 'x' after 54"),
    ],
)
def test_a_job_that_did_not_end_well_raises_and_names_its_evidence(
    changes: dict[str, Any], error: type[FlatoutError], message: str
) -> None:
    evidence = builders.evidence(job=builders.job(**changes))
    assert len(evidence.steps) == 54
    with pytest.raises(error, match=message) as raised:
        launch._check_ending(evidence, ending(0), Path("kept.json"), "train.py")
    assert "kept.json" in str(raised.value)


def test_a_job_without_steps_has_nothing_to_diagnose_and_says_whether_it_failed() -> None:
    bare = builders.evidence(steps=(), job=builders.job(ended="finished", exit_code=0))
    with pytest.raises(NothingMeasured, match=r"train\.py ended without a training step"):
        launch._check_ending(bare, ending(0), Path("e.json"), "train.py")
    elsewhere = dataclasses.replace(bare, missing=(f"{UNWATCHED} computed for 12 s",))
    with pytest.raises(NothingMeasured, match=r"without a training step; .*computed for 12 s.*watches every"):
        launch._check_ending(elsewhere, ending(0), Path("e.json"), "train.py")
    inside = "the step under way: it had not ended after 41 s, most of it at train.py:9"
    unfinished = builders.evidence(steps=(), job=builders.job(ended="measured"), missing=(inside,))
    with pytest.raises(NothingMeasured, match=r"the time was up before a step was measured; the step under"):
        launch._check_ending(unfinished, ending(0), Path("e.json"), "train.py")
    usage = builders.evidence(steps=(), job=builders.job(ended="finished", exit_code=2, error="no data"))
    with pytest.raises(ScriptFailed, match=r"train\.py ended with exit code 2 before any step.*: no data"):
        launch._check_ending(usage, ending(0), Path("e.json"), "train.py")
    raised = builders.evidence(steps=(), job=builders.job(ended="crashed", error="KeyError: 'x'"))
    with pytest.raises(ScriptFailed, match=r"raised KeyError: 'x' before any step") as failure:
        launch._check_ending(raised, ending(0), Path("e.json"), "train.py")
    assert "e.json" not in str(failure.value)
    early = builders.evidence(job=builders.job(ended="finished", exit_code=3))
    launch._check_ending(early, ending(0), Path("e.json"), "train.py")  # its steps are worth a report


def test_evidence_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    save_evidence(builders.evidence(), path)
    before = launch._stamp(path)
    with pytest.raises(ScriptFailed, match=r"train\.py was ended by SIGKILL before.*memory runs out"):
        launch._read(path, before, ending(-signal.SIGKILL), "train.py")
    with pytest.raises(ScriptFailed, match="ended with exit code 3 before any step"):
        launch._read(path, before, ending(3), "train.py")
    with pytest.raises(Interrupted):
        launch._read(path, before, ending(1, interrupted=True), "train.py")
    assert load_evidence(path) == builders.evidence()  # and it is not lost
    save_evidence(builders.cpu_evidence(), path)
    assert launch._read(path, before, ending(0), "train.py") == builders.cpu_evidence()


def test_a_job_that_says_nothing_more_is_killed_and_one_that_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "LOOK_S", 0.01)
    monkeypatch.setattr(launch, "NEWS_S", 0.03)
    silent = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert not launch._ends_in_time(silent, launch._Told(due_s=0.0))
    assert silent.wait() == -signal.SIGKILL
    for due_s in (None, time.monotonic() + 1000.0):
        with subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.DEVNULL) as ends:
            assert launch._ends_in_time(ends, launch._Told(due_s=due_s))


def test_what_a_killed_job_had_saved_is_reported() -> None:
    saved = builders.evidence(
        job=builders.job(ended="crashed", exit_code=None, error="killed"),
        missing=("the job ended after 2 of 3 planned blocks", "kernels: failed"),
    )
    evidence = launch._of_killed(saved)
    launch._check_ending(evidence, ending(-signal.SIGKILL), Path("e.json"), "train.py")
    assert (evidence.job.ended, evidence.job.error) == ("measured", None)
    first, second = evidence.missing
    assert first == "kernels: failed" and second.startswith(UNFINISHED)


def test_a_script_that_failed_before_its_first_step_and_was_slow_to_end_has_failed() -> None:
    error = "ImportError: no such name"
    job = builders.job(ended="crashed", exit_code=1, error=error)
    evidence = launch._of_killed(builders.evidence(job=job, steps=()))
    with pytest.raises(ScriptFailed, match=f"{error} before any step was measured"):
        launch._check_ending(evidence, ending(0), Path("e.json"), "train.py")


def test_a_job_that_comes_to_no_step_in_time_is_told_of_more_time(tmp_path: Path) -> None:
    killed = dataclasses.replace(ending(-signal.SIGKILL), killed=True)
    with pytest.raises(NothingMeasured, match=r"the time was up before a step.* larger --seconds"):
        launch._read(tmp_path / "e.json", None, killed, "train.py")


# -- nothing is left behind


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_only_processes_of_the_job_are_ended() -> None:
    """Also one that ignores SIGTERM; what this process started otherwise is not touched."""
    ours, other = sleeper(**{launch.MARK: "job"}), sleeper(**{launch.MARK: "other"})
    try:
        launch._end_leftovers("job")
        assert not psutil.pid_exists(ours.pid) or ours.poll() is not None
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_a_job_that_dies_hard_leaves_its_evidence_and_no_process(tmp_path: Path) -> None:
    """The earlier evidence at the same place gives way to what was known of this run."""
    body = """
    import signal, subprocess
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    num = 0
    while True:
        for x, y in DataLoader(data, batch_size=16, num_workers=1):
            train_step(x, y)
            num += 1
            if num == 60:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    write_script(tmp_path / "train.py", body, preamble=BY_HAND)
    save_evidence(builders.evidence(), tmp_path / "e.json")
    ran = diagnose("--save", "e.json", "train.py", folder=tmp_path)
    assert ran.code == 2
    assert len(ran.said) == 1
    assert "e.json" in ran.said[0]
    assert ran.left == ()
    kept = load_evidence(tmp_path / "e.json")
    assert (kept.job.ended, kept.job.command) == ("crashed", ("train.py",))
    assert kept.sites or kept.steps


SWALLOWS_ONE = """
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("swallowed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_interrupt_that_an_import_swallowed_is_sent_again(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    monkeypatch.setattr(launch, "AGAIN_S", 0.25)
    with subprocess.Popen(
        [sys.executable, "-c", SWALLOWS_ONE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"swallowed\n"
        if has_begun:
            with pytest.raises(subprocess.TimeoutExpired):
                launch._wait_for_end(process, launch._Told(has_begun=True))
            process.kill()
        else:
            assert launch._wait_for_end(process, launch._Told()) != 0


def test_what_a_job_writes_is_thrown_away_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.pt").write_text("a week of training")
    (tmp_path / "job.py").write_text(
        """
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "weights.pt")
assert "weight" in torch.load("weights.pt")
open("log.txt", "w").close()
"""
    )
    with launch.writes_thrown_away():
        evidence = run_job(["job.py"], tmp_path / "kept" / "e.json")
    assert evidence.job.ended == "finished" and evidence.job.exit_code == 0
    assert (tmp_path / "weights.pt").read_text() == "a week of training"
    assert {path.name for path in tmp_path.iterdir()} == {"job.py", "weights.pt", "kept"}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["e.json"]
