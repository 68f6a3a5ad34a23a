"""Scripts that end in their own way, or are ended: `flatout diagnose` loses nothing and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flatout.measure.evidence_file import load_evidence
from flatout.measure.run.lineage import UNFINISHED
from tests.support.cli import (
    ARMS,
    BRIEFLY,
    COUNTERFACTUAL,
    ENVIRONMENT,
    SCRIPTS,
    arms,
    diagnose,
    losses,
    observe,
    the_loader,
    unobserved,
)
from tests.support.measure import ENDLESS, flatout


def test_the_exit_code_of_a_script_that_ends_early_passes_through(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "exit", save=tmp_path / "evidence.json")
    assert outcome.code == 3
    assert outcome.evidence is not None
    assert (outcome.evidence.job.ended, outcome.evidence.job.exit_code) == ("finished", 3)
    assert len(outcome.evidence.steps) == 2
    assert [reason for reason in outcome.evidence.missing if "ended before its steps were steady" in reason]


def test_a_script_that_swallows_the_end_is_ended_by_force(tmp_path: Path) -> None:
    outcome = observe("misbehaves.py", "swallow", save=tmp_path / "evidence.json")
    assert arms(outcome.measured) == ARMS
    assert outcome.stdout.count("swallowed\n") == 2


def test_training_on_a_thread(tmp_path: Path) -> None:
    evidence = observe("misbehaves.py", "thread", save=tmp_path / "evidence.json").measured
    assert arms(evidence) == ARMS
    assert the_loader(evidence).trains
    assert (evidence.phase_s("backward") or 0.0) > 0.0


def test_a_thread_that_waits_for_the_end_of_training_does_not_hold_up_the_report(tmp_path: Path) -> None:
    evidence = observe("misbehaves.py", "watched", save=tmp_path / "evidence.json").measured
    assert arms(evidence) == ARMS


def test_a_script_that_leaves_without_cleaning_up_is_reported(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "leave", save=tmp_path / "evidence.json")
    assert outcome.code == 3, outcome.stderr
    assert outcome.evidence is not None
    assert (outcome.evidence.job.ended, outcome.evidence.job.exit_code) == ("finished", 3)
    assert len(outcome.evidence.steps) == 59
    assert "59 observed" in outcome.stdout


def test_a_script_that_fails_on_half_a_batch_is_measured_without_it(tmp_path: Path) -> None:
    outcome = observe("misbehaves.py", "half", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS - {"half"}
    assert evidence.counterfactual("cached") is not None
    assert evidence.counterfactual("half") is None
    (reason,) = [arm.reason for arm in evidence.arms_not_run if arm.label == "half"]
    assert reason.startswith("the script failed under it: RuntimeError: ")
    assert "Traceback" not in outcome.stderr


def test_a_script_that_fails_without_a_statement_is_measured_with_it(tmp_path: Path) -> None:
    outcome = diagnose("needs_its_statement.py", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert all(found.function != "spend" for found in evidence.counterfactuals)
    assert any(
        arm.kind == "knock-out" and "the script failed under it" in arm.reason
        for arm in evidence.arms_not_run
    )
    assert "; measuring again without it\n" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    (finding,) = [line for line in outcome.stdout.splitlines() if line.startswith("FO207")]
    assert "n/a" in finding  # a share, and no ceiling: nothing was left out


def test_an_error_of_the_script_itself_is_laid_to_no_arm(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "raise", save=tmp_path / "evidence.json")
    assert outcome.code == 2, outcome.stderr
    assert outcome.stderr.count("ValueError: the data end here\n") == 1  # its traceback
    evidence = outcome.evidence
    assert evidence is not None
    assert (evidence.job.ended, evidence.job.error) == ("crashed", "ValueError: the data end here")
    assert not [arm for arm in evidence.arms_not_run if "failed" in arm.reason]


@pytest.mark.parametrize(("way", "where"), [("wait", "misbehaves.py"), ("native", "native code")])
def test_a_job_that_waits_for_ever_is_ended_and_reported(way: str, where: str, tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", way, save=tmp_path / "evidence.json", options=("--seconds", "4"))
    evidence = outcome.measured
    assert 0 < len(evidence.steps) <= 60  # of one that is killed, those of the blocks that had ended
    (reason,) = [reason for reason in evidence.missing if reason.startswith(UNFINISHED)]
    assert where in reason
    assert ("finally\n" in outcome.stdout) == (way == "wait")


def test_an_interrupt_that_meets_a_job_which_an_arm_has_just_ended_ends_the_diagnosis(tmp_path: Path) -> None:
    """The job no longer hears it; it must not be run again."""
    outcome = diagnose("misbehaves.py", "half-interrupted", save=tmp_path / "evidence.json")
    assert outcome.code == 130, outcome.stderr
    assert "flatout: interrupted after " in outcome.stderr and "measuring again" not in outcome.stderr
    assert outcome.evidence is not None and outcome.evidence.job.ended == "interrupted"


def test_a_module_of_a_package_that_ends_before_the_plan_does(tmp_path: Path) -> None:
    package = tmp_path / "jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(SCRIPTS / "plain_loop.py", package / "train.py")
    options = (*BRIEFLY, "-m")
    outcome = diagnose(
        "jobs.train", "--steps", "9", save=Path("evidence.json"), options=options, folder=tmp_path
    )
    assert outcome.code in (0, 1), outcome.stderr
    assert "trained 9 steps" in outcome.stdout
    evidence = outcome.evidence
    assert evidence is not None
    assert (evidence.job.ended, evidence.job.exit_code) == ("finished", 0)
    assert evidence.job.command == ("-m", "jobs.train", "--steps", "9")
    assert len(evidence.steps) == 8
    assert str(the_loader(evidence).place).startswith("jobs/train.py:")
    assert [reason for reason in evidence.missing if "ended" in reason]


def test_a_job_that_is_kept_running_trains_as_if_nobody_watched(tmp_path: Path) -> None:
    command = ("plain_loop.py", "--workers", "2", "--persistent", "--hook", "--steps", "600", "--exit", "5")
    options = (*BRIEFLY, "--keep-running")
    outcome = diagnose(*command, save=tmp_path / "evidence.json", options=options)
    assert outcome.code == 5, outcome.stderr
    alone = unobserved(*command, code=5)
    assert losses(outcome.stdout) == losses(alone)
    assert len(losses(alone)) == 600
    assert outcome.stdout.startswith(alone)
    assert "flatout: measured; the script continues\n" in outcome.stderr
    evidence = outcome.evidence
    assert evidence is not None
    assert (evidence.job.ended, evidence.job.exit_code) == ("measured", 5)
    assert arms(evidence) == ARMS - set(COUNTERFACTUAL)
    assert len(evidence.steps) < 599


# Interruptions


class Running:
    """A diagnosis in progress, with two forked workers that stay, that has come to the counterfactuals."""

    MARK = "FLATOUT_TEST_RUN"

    def __init__(self, save: Path, *, terminal: int | None = None) -> None:
        self.save = save
        self.mark = str(save)
        self.process = subprocess.Popen(
            [*flatout(ENDLESS), "--save", str(save), "plain_loop.py", "--workers", "2", "--persistent"],
            cwd=SCRIPTS,
            env={**ENVIRONMENT, self.MARK: self.mark},
            stdin=terminal if terminal is not None else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # the tests run on one thread, so the child may run Python before it becomes flatout
            preexec_fn=(lambda: take_terminal(terminal)) if terminal is not None else None,  # noqa: PLW1509
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if "cached" in line:
                break

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(self.MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def finish(self) -> list[str]:
        """The rest of what it says, once it has ended."""
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            rest = stream.read().splitlines()
        self.process.wait()
        return rest


def take_terminal(terminal: int) -> None:
    """Make `terminal` the controlling terminal: what is typed there reaches this login as signals."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.fixture
def pseudo_terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = os.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def assert_interrupted(running: Running) -> None:
    said = running.finish()
    assert running.alive() == []
    assert running.process.returncode == 130
    evidence = load_evidence(running.save)
    assert evidence.job.ended == "interrupted"
    assert len(evidence.steps) > 10
    expected = f"flatout: interrupted after {len(evidence.steps)} measured steps"
    assert [line for line in said if line.startswith(expected)]


def test_control_c_in_a_terminal_keeps_the_evidence_and_leaves_nothing_running(
    tmp_path: Path, pseudo_terminal: tuple[int, int]
) -> None:
    ours, theirs = pseudo_terminal
    running = Running(tmp_path / "evidence.json", terminal=theirs)
    assert len(running.alive()) >= 4  # flatout, the job and its two workers
    os.write(ours, b"\x03")
    assert_interrupted(running)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a job that its parent is gone")
def test_a_killed_diagnosis_takes_its_job_along_and_leaves_the_evidence(tmp_path: Path) -> None:
    running = Running(tmp_path / "evidence.json")
    assert len(running.alive()) >= 4
    running.process.kill()
    running.finish()  # the job and its workers hold the pipe: it ends with the last of them
    psutil.wait_procs(running.alive(), timeout=60)
    assert running.alive() == []
    evidence = load_evidence(running.save)
    assert evidence.job.ended == "interrupted"
    assert len(evidence.steps) > 10


def test_a_job_killed_in_the_middle_leaves_its_evidence_and_no_workers(tmp_path: Path) -> None:
    running = Running(tmp_path / "evidence.json")
    (job,) = psutil.Process(running.process.pid).children()
    assert len(job.children()) >= 2
    job.kill()
    (said,) = (line for line in running.finish() if line.startswith("flatout: plain_loop.py"))
    assert running.alive() == []
    assert running.process.returncode == 2
    evidence = load_evidence(running.save)
    assert evidence.job.ended == "crashed"
    assert len(evidence.steps) > 10
    assert f"was ended by SIGKILL after {len(evidence.steps)} measured steps" in said
    assert "the kernel sends SIGKILL when memory runs out" in said
