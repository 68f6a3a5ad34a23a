"""What cannot be done: one clear line, exit code 2, nothing left running, nothing lost."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from flatout.measure.evidence import EVIDENCE_VERSION
from flatout.measure.evidence_file import load_evidence, save_evidence
from tests.support import doctor as builders
from tests.support.measure import BY_HAND, ENDLESS, FOREVER, Ran, diagnose, write_script


def one_line(ran: Ran, *, code: int = 2) -> str:
    """The one line a command that could not do its work ends with."""
    assert ran.code == code, (ran.stdout, ran.stderr)
    assert ran.left == ()
    assert ran.stdout == ""
    assert len(ran.said) == 1, ran.stderr
    assert ran.stderr.splitlines()[-1] == ran.said[0]
    return ran.said[0].removeprefix("flatout: ")


def only_line(ran: Ran, *, code: int = 2) -> str:
    """The same, with nothing beside it."""
    line = one_line(ran, code=code)
    assert ran.stderr.lstrip("\n") == f"flatout: {line}\n"
    return line


# -- nothing to run


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert only_line(diagnose("absent.py", folder=tmp_path)) == (
        "no script at absent.py; check the path, or use -m for a module"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    assert "jobs is a folder" in only_line(diagnose("jobs", folder=tmp_path))


@pytest.mark.parametrize("name", ["no_such_package.train", "no_such_module"])
def test_a_module_that_does_not_exist(name: str, tmp_path: Path) -> None:
    line = only_line(diagnose("-m", name, folder=tmp_path))
    assert "no_such_" in line and "module" in line
    assert list(tmp_path.iterdir()) == []


# -- Evidence files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "e.json"
    save_evidence(builders.evidence(), path)
    return path


def refused(path: Path) -> str:
    """What is said of an Evidence file that cannot be read; the file stays as it is."""
    before = path.read_bytes() if path.exists() else None
    line = only_line(diagnose("--evidence", path.name, folder=path.parent))
    assert "e.json" in line
    assert (path.read_bytes() if path.exists() else None) == before
    return line


def test_an_evidence_file_that_is_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "e.json").startswith("no Evidence file at e.json; check the path")


def test_an_evidence_file_cut_in_half(saved: Path) -> None:
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    assert refused(saved).startswith("e.json is not complete JSON")


def test_an_evidence_file_of_a_newer_version(saved: Path) -> None:
    saved.write_text(json.dumps({**json.loads(saved.read_text()), "version": EVIDENCE_VERSION + 1}))
    line = refused(saved)
    assert f"version {EVIDENCE_VERSION + 1}; this flatout reads up to {EVIDENCE_VERSION}" in line
    assert "pip install --upgrade flatout" in line


@pytest.mark.parametrize("text", ["[1, 2]", '{"loss": 0.1}', "null"])
def test_foreign_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(text)
    assert refused(tmp_path / "e.json").startswith("e.json is not an Evidence file; ")


def test_a_wrong_type_inside(saved: Path) -> None:
    data = json.loads(saved.read_text())
    data["steps"][2]["phases_s"]["forward"] = [1]
    saved.write_text(json.dumps(data))
    assert "e.json.steps[2].phases_s.forward is list, expected float" in refused(saved)


# -- scripts


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", "print('only talk')\n", preamble="")
    ran = diagnose("train.py", folder=tmp_path)
    assert ran.stdout == "only talk\n"
    assert ran.code == 2
    assert ran.left == ()
    assert ran.stderr.startswith("flatout: train.py ended without a training step; ")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()", ""),
        ("import sys; sys.exit('no data at ./data')", ": no data at ./data"),
    ],
)
def test_a_script_that_fails_before_its_first_step(body: str, words: str, tmp_path: Path) -> None:
    """No empty report: its own last words, and one line with its exit code."""
    write_script(tmp_path / "train.py", body, preamble="")
    ran = diagnose("train.py", folder=tmp_path)
    code = 1 if words else 2
    assert one_line(ran) == (
        f"train.py ended with exit code {code} before any step was measured{words}; its last output is above"
    )
    said = ran.stderr.splitlines()[-2]
    assert said in ("no data at ./data", "train.py: error: the following arguments are required: data")


def test_a_script_that_raises_in_step_three(tmp_path: Path) -> None:
    body = """
    def fail():
        raise ValueError("the labels are empty")

    for step, (x, y) in enumerate(DataLoader(data, batch_size=16, num_workers=1), 1):
        if step == 3:
            fail()
        train_step(x, y)
    """
    script = write_script(tmp_path / "train.py", body)
    ran = diagnose("--save", "e.json", "train.py", folder=tmp_path)
    line = one_line(ran)
    assert "train.py raised ValueError: the labels are empty after 1 measured steps" in line
    assert "e.json" in line
    # the traceback is the script's own: its frames and no other
    traceback = ran.stderr.splitlines()[:-1]
    raised_at = script.read_text().splitlines().index('    raise ValueError("the labels are empty")') + 1
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: the labels are empty"
    frames = [text.strip() for text in traceback if text.startswith("  File ")]
    assert len(frames) == 2
    assert all("train.py" in frame for frame in frames)
    assert frames[-1].endswith(f"line {raised_at}, in fail")
    # and what was known is kept
    kept = load_evidence(tmp_path / "e.json")
    assert (kept.job.ended, kept.job.exit_code) == ("crashed", 1)
    assert kept.job.error == "ValueError: the labels are empty"
    assert len(kept.steps) == 1
    assert [loader.num_workers for loader in kept.loaders] == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_script_that_forks_workers_and_is_interrupted(number: int, tmp_path: Path) -> None:
    body = """
    loader = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
    for step in range(10**9):
        for x, y in loader:
            train_step(x, y)
        if step == 1:
            print("training", flush=True)
    """
    write_script(tmp_path / "train.py", body, preamble=BY_HAND)

    def interrupt(process: Any) -> None:
        assert process.stdout.readline() == "training\n"
        assert len(psutil.Process(process.pid).children(recursive=True)) >= 3  # the job and its workers
        process.send_signal(number)

    ran = diagnose("--save", "e.json", "train.py", folder=tmp_path, schedule=ENDLESS, during=interrupt)
    assert (ran.code, ran.left) == (130, ())
    assert ran.stdout in ("", "training\n")  # again, where an arm under which it failed came first
    # a worker that was handing over a tensor may be cut off in mid-complaint; the job and flatout say no more
    before, said, after = ran.stderr.partition("flatout: interrupted after ")
    assert said
    assert after.endswith("e.json\n") and after.count("\n") == 1
    assert "KeyboardInterrupt" not in before
    assert "flatout/" not in before
    kept = load_evidence(tmp_path / "e.json")
    assert kept.job.ended == "interrupted"
    assert kept.steps


def test_an_interrupt_before_the_script_runs(tmp_path: Path) -> None:
    """Importing torch takes the longest; somebody who mistyped an argument does not wait for it."""
    write_script(tmp_path / "train.py", FOREVER, preamble=BY_HAND)

    def interrupt(process: Any) -> None:
        while not (children := psutil.Process(process.pid).children()):
            pass
        while children[0].cpu_times().user < 0.3:  # past Python's own start, inside an import
            pass
        process.send_signal(signal.SIGINT)

    ran = diagnose("--save", "e.json", "train.py", folder=tmp_path, during=interrupt)
    line = one_line(ran, code=130)  # an import that is interrupted in C++ says so, under plain Python too
    assert line.startswith("interrupted before any step was measured")
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "e.json"}


# -- places to write to


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", FOREVER, preamble=BY_HAND)
    line = only_line(diagnose("--save", "train.py/e.json", "train.py", folder=tmp_path))
    assert "cannot be written" in line
    line = only_line(diagnose("--save", ".", "train.py", folder=tmp_path))
    assert "is a folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def limit_file_size() -> None:
    """No file may grow past some kilobytes: to the writer it looks like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """What was saved there before stays whole."""
    write_script(tmp_path / "train.py", FOREVER, preamble=BY_HAND)
    (tmp_path / "e.json").write_text("kept")
    ran = diagnose(
        "--save", "e.json", "--seconds", "60", "train.py", folder=tmp_path, preexec_fn=limit_file_size
    )
    line = one_line(ran)
    assert "the evidence could not be written" in line and "e.json: File too large" in line
    assert "Traceback" not in ran.stderr
    assert (tmp_path / "e.json").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.json", "train.py"]
