"""Scripts nobody tuned for: every way to load, to step and to end, under `flatout diagnose`.

One run answers several questions, because most of its time is the import of torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flatout.measure.evidence import Evidence, Loader
from flatout.measure.evidence_file import load_evidence
from tests.cli.running import BRIEFLY, ENVIRONMENT, SCRIPTS, diagnose, flatout, line_of, losses

ARMS = {"warmup", "real", "count", "kernels", "attribution", "memory", "cached", "half"}
COUNTERFACTUAL = ("cached", "half")


def arms(evidence: Evidence) -> set[str]:
    return {step.arm for step in evidence.steps}


def usual(evidence: Evidence, field: str) -> int:
    """What most steps have of `field`."""
    return Counter(getattr(step, field) for step in evidence.steps).most_common(1)[0][0]


def the_loader(evidence: Evidence) -> Loader:
    (loader,) = evidence.loaders
    return loader


def unobserved(*command: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=SCRIPTS, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def assert_losses_are_unchanged(evidence: Evidence, observed: str, reference: str) -> None:
    """Up to the first step that was given another batch than its own."""
    first = min(step.index for step in evidence.steps if step.arm in COUNTERFACTUAL)
    assert first > 10
    assert losses(observed)[: first - 1] == losses(reference)[: first - 1]
    assert len(losses(reference)) >= first - 1


# Loaders


@pytest.fixture(scope="module")
def reference() -> str:
    return unobserved("plain_loop.py", "--steps", "60")


def test_a_plain_loop_with_dataclass_batches(tmp_path: Path, reference: str) -> None:
    outcome = diagnose("plain_loop.py", "--batches", "dataclass", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    assert_losses_are_unchanged(evidence, outcome.stdout, reference)
    loader = the_loader(evidence)
    assert (loader.num_workers, loader.batch_size, loader.num_batches, loader.trains) == (0, 16, 40, True)
    assert str(loader.place) == f"plain_loop.py:{line_of('plain_loop.py', 'Samples(), batch_size=16')}"
    assert loader.collate_place is not None and loader.collate_place.function == "collate_records"
    assert loader.fetch_s is not None and loader.collate_s is not None
    assert {step.rows for step in evidence.steps if step.arm != "half"} == {16}
    assert {step.rows for step in evidence.steps if step.arm == "half"} == {8}
    assert {name: evidence.counterfactual(name) is not None for name in COUNTERFACTUAL} == {
        "cached": True,
        "half": True,
    }
    assert evidence.job.exit_code == 0
    assert "Evidence:" in outcome.stdout


@pytest.mark.parametrize(
    ("context", "options"),
    [
        ("fork", ()),
        ("spawn", ("--persistent", "--dataset", "iterable")),
        ("forkserver", ("--persistent", "--dataset", "batch_sampler")),
    ],
)
def test_two_workers(context: str, options: tuple[str, ...], tmp_path: Path) -> None:
    command = ("plain_loop.py", "--workers", "2", "--context", context, *options)
    outcome = diagnose(*command, save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    loader = the_loader(evidence)
    assert loader.trains
    assert loader.num_batches == (None if "iterable" in options else 40)
    assert loader.persistent_workers == ("--persistent" in options)
    assert loader.batch_size == 16
    assert [worker.worker for worker in loader.workers] == [0, 1]
    assert all(worker.num_batches > 0 and worker.fetch_s > 0 for worker in loader.workers)
    assert loader.epochs[0].iter_s > 0
    stacks = [call for call in loader.calls if call.function == "torch.stack"]  # counted in the worker
    assert [(call.place.function, call.in_collate) for call in stacks] == [("collate_pairs", True)]
    assert usual(evidence, "num_batches") == 1


def test_accumulation_over_a_loader_hidden_in_a_generator_by_a_script_that_changes_folder(
    tmp_path: Path,
) -> None:
    shutil.copy(SCRIPTS / "accumulation.py", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    outcome = diagnose("accumulation.py", "elsewhere", save=Path("evidence.json"), folder=tmp_path)
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    assert {step.num_batches for step in evidence.steps} == {4}
    assert {step.num_backwards for step in evidence.steps} == {4}
    place = the_loader(evidence).place
    assert str(place) == f"accumulation.py:{line_of('accumulation.py', '# the loader')}"
    assert str(place).partition(":")[0] in evidence.sources
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("how", ["structure", "in-place"])
def test_batches_changed_by_the_script_come_back_as_they_were(how: str, tmp_path: Path) -> None:
    outcome = diagnose("mutation.py", how, save=tmp_path / "evidence.json")
    evidence = outcome.measured  # the script ends with an error when a served batch is not as it was
    assert arms(evidence) == ARMS
    assert evidence.missing == ()
    assert evidence.counterfactual("cached") is not None


# Steps


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    evidence = diagnose("gan.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "Adam.step"
    assert {step.num_batches for step in evidence.steps} == {2}
    assert {step.num_backwards for step in evidence.steps} == {3}
    assert arms(evidence) == ARMS


def test_the_closure_of_lbfgs_is_not_optimizer_time(tmp_path: Path) -> None:
    evidence = diagnose("lbfgs.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "LBFGS.step"
    assert {step.num_batches for step in evidence.steps} == {1}
    assert {step.num_backwards for step in evidence.steps} == {3}
    assert {step.num_forwards for step in evidence.steps} == {3}
    rest_s, optimizer_s = evidence.phase_s("rest"), evidence.phase_s("optimizer")
    assert rest_s and optimizer_s
    assert optimizer_s < rest_s


def test_neither_optimizer_nor_loader(tmp_path: Path) -> None:
    evidence = diagnose("manual_sgd.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "backward"
    assert {step.num_backwards for step in evidence.steps} == {1}
    assert {step.num_batches for step in evidence.steps} == {0}
    assert evidence.loaders == ()
    assert [reason for reason in evidence.missing if "DataLoader" in reason]
    assert not [reason for reason in evidence.missing if "mode" in reason]
    (created,) = (site for site in evidence.sites if site.op == "randn")
    assert created.calls_per_step == 1.0
    assert created.place.line == line_of("manual_sgd.py", "torch.randn(32, 64)")


def test_inference_is_stepped_by_the_model_called_last(tmp_path: Path) -> None:
    evidence = diagnose("inference.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "Linear call"
    assert {step.num_forwards for step in evidence.steps} == {2}
    assert {step.num_batches for step in evidence.steps} == {1}
    assert {step.num_backwards for step in evidence.steps} == {0}
    (sync,) = (site for site in evidence.sites if site.op == "__float__")
    assert sync.calls_per_step == 16.0
    assert sync.place.line == line_of("inference.py", "# one sync per row")
    assert evidence.counterfactual("cached") is not None


def test_steps_the_script_marks_itself(tmp_path: Path) -> None:
    evidence = diagnose("explicit.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "flatout.step"
    assert (evidence.phase_s("rest") or 0.0) > 0.99 * (evidence.step_s or 0.0) > 0.0


def test_a_compiled_model_is_counted_by_its_own_lines_and_not_compiled_again(tmp_path: Path) -> None:
    outcome = diagnose("compiled.py", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS
    (rows,) = (site for site in evidence.sites if site.kind == "row" and site.via is None)
    assert rows.place.line == line_of("compiled.py", "# row by row")
    assert rows.place.function == "Rows.forward"
    assert rows.calls_per_step == 16.0
    # the full batch once, and half of it once: nothing that an instrument caused
    assert "compiled 2 graphs" in outcome.stdout
    assert {step.num_forwards for step in evidence.steps} == {1}


def test_evaluation_is_not_taken_for_training(tmp_path: Path) -> None:
    evidence = diagnose("evaluation.py", save=tmp_path / "evidence.json").measured
    assert evidence.job.anchor == "SGD.step"
    assert arms(evidence) == ARMS
    trains = {loader.place.line: loader.trains for loader in evidence.loaders if loader.place}
    assert trains == {
        line_of("evaluation.py", "training = "): True,
        line_of("evaluation.py", "held_out = "): False,
    }
    kept = [step for step in evidence.steps if step.kept]
    assert {step.num_batches for step in kept} == {1}
    assert any(step.num_batches == 101 for step in evidence.steps)


# Endings


def test_a_script_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "raise", save=tmp_path / "evidence.json")
    assert outcome.code == 2
    line = line_of("misbehaves.py", 'raise Unlucky("the third step")')
    assert f'misbehaves.py", line {line}, in train' in outcome.stderr
    assert "flatout/measure" not in outcome.stderr
    assert "runpy" not in outcome.stderr
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("flatout: misbehaves.py raised Unlucky: the third step after 2 measured steps")
    assert outcome.evidence is not None
    assert (outcome.evidence.job.ended, outcome.evidence.job.exit_code) == ("crashed", 1)
    assert len(outcome.evidence.steps) == 2


def test_the_exit_code_of_a_script_that_ends_early_passes_through(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "exit", save=tmp_path / "evidence.json")
    assert outcome.code == 3
    assert outcome.evidence is not None
    assert (outcome.evidence.job.ended, outcome.evidence.job.exit_code) == ("finished", 3)
    assert len(outcome.evidence.steps) == 2
    assert [reason for reason in outcome.evidence.missing if "ended before it was steady" in reason]


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "idle", save=tmp_path / "evidence.json")
    assert outcome.code == 2
    assert outcome.stdout == "nothing to train\n"
    assert len(outcome.stderr.splitlines()) == 1
    assert "ended without a training step" in outcome.stderr


def test_a_script_that_swallows_the_end_is_ended_by_force(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "swallow", save=tmp_path / "evidence.json")
    assert arms(outcome.measured) == ARMS
    assert outcome.stdout.count("swallowed\n") == 2


def test_training_on_a_thread(tmp_path: Path) -> None:
    evidence = diagnose("misbehaves.py", "thread", save=tmp_path / "evidence.json").measured
    assert arms(evidence) == ARMS
    assert the_loader(evidence).trains
    assert (evidence.phase_s("backward") or 0.0) > 0.0


def test_a_script_that_fails_on_half_a_batch_is_measured_without_it(tmp_path: Path) -> None:
    outcome = diagnose("misbehaves.py", "half", save=tmp_path / "evidence.json")
    evidence = outcome.measured
    assert arms(evidence) == ARMS - {"half"}
    assert evidence.counterfactual("cached") is not None
    assert evidence.counterfactual("half") is None
    assert "half batch: the script raised on half a batch" in evidence.missing
    assert "Traceback" not in outcome.stderr


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
    command = ("plain_loop.py", "--workers", "2", "--persistent", "--hook", "--steps", "500", "--exit", "5")
    options = (*BRIEFLY, "--keep-running")
    outcome = diagnose(*command, save=tmp_path / "evidence.json", options=options)
    assert outcome.code == 5, outcome.stderr
    alone = unobserved(*command, code=5)
    assert losses(outcome.stdout) == losses(alone)
    assert len(losses(alone)) == 500
    assert outcome.stdout.startswith(alone)
    evidence = outcome.evidence
    assert evidence is not None
    assert (evidence.job.ended, evidence.job.exit_code) == ("measured", 5)
    assert arms(evidence) == ARMS - set(COUNTERFACTUAL)
    assert len(evidence.steps) < 499


# Interruptions


class Running:
    """A diagnosis in progress, with two forked workers, that has come to the counterfactuals."""

    MARK = "FLATOUT_TEST_RUN"

    def __init__(self, save: Path, *, terminal: int | None = None) -> None:
        self.save = save
        self.mark = str(save)
        self.process = subprocess.Popen(
            [*flatout(), "--save", str(save), "plain_loop.py", "--workers", "2"],
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
    assert running.process.returncode == 2
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


def test_sigterm_keeps_the_evidence_and_leaves_nothing_running(tmp_path: Path) -> None:
    running = Running(tmp_path / "evidence.json")
    assert len(running.alive()) >= 4
    running.process.send_signal(signal.SIGTERM)
    assert_interrupted(running)


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
