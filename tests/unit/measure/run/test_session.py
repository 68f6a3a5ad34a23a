"""The observed process: how a script is run, ended and kept apart from its observation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.measure.evidence import Evidence
from flatout.measure.evidence_file import load_evidence
from flatout.measure.run import session
from flatout.measure.run.assemble import Ending
from flatout.measure.run.session import JobOptions, Session
from tests.support.measure import BY_HAND, PREAMBLE, Ran, diagnose, write_script


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosed:
    ran: Ran
    evidence: Evidence
    folder: Path


def diagnosed(
    folder: Path, body: str, *flags: str, arguments: tuple[str, ...] = ("train.py",), preamble: str = PREAMBLE
) -> Diagnosed:
    write_script(folder / "train.py", body, preamble=preamble)
    ran = diagnose("--save", "e.json", "--seconds", "60", *flags, *arguments, folder=folder)
    return Diagnosed(ran=ran, evidence=load_evidence(folder / "e.json"), folder=folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Diagnosed:
    """A script that would run for ever, with a pool, workers, a sibling, arguments and a finally block."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "sibling.py").write_text("NAME = 'sibling'\n")
    body = """
    import multiprocessing, sibling
    from pathlib import Path
    assert __name__ == "__main__"
    print("arguments", sys.argv, sibling.NAME)
    print("to stderr", file=sys.stderr)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    try:
        while True:
            for x, y in DataLoader(data, batch_size=16, num_workers=2):
                try:
                    train_step(x, y)
                except Exception:
                    print("an ordinary handler saw the end")
    finally:
        Path("finally.txt").write_text("ran")
    """
    return diagnosed(folder, body, "--json", arguments=("train.py", "--epochs", "3"))


def test_a_script_is_ended_when_it_is_measured(ended: Diagnosed) -> None:
    assert ended.ran.code in (0, 1)
    assert ended.ran.said == ["flatout: Evidence is in e.json"]
    assert (ended.evidence.job.ended, ended.evidence.job.exit_code) == ("measured", 0)
    assert ended.evidence.job.command == ("train.py", "--epochs", "3")
    assert ended.evidence.counterfactual("cached") is not None
    assert ended.evidence.counterfactual("half") is not None


def test_its_finally_blocks_run_and_its_handlers_see_nothing(ended: Diagnosed) -> None:
    assert (ended.folder / "finally.txt").read_text() == "ran"
    assert "ordinary handler" not in ended.ran.stderr


def test_its_own_output_passes_through_beside_the_document(ended: Diagnosed) -> None:
    document = ended.ran.json()
    assert document["evidence"] == json.loads((ended.folder / "e.json").read_text())
    assert "arguments ['train.py', '--epochs', '3'] sibling\n" in ended.ran.stderr
    assert "to stderr\n" in ended.ran.stderr


def test_processes_it_forks_end_quietly(ended: Diagnosed) -> None:
    """A pool is ended by SIGTERM, which the observed process itself takes as an interrupt."""
    assert "Traceback" not in ended.ran.stderr
    assert "KeyboardInterrupt" not in ended.ran.stderr


def test_nothing_of_it_is_left_running(ended: Diagnosed) -> None:
    assert ended.ran.left == ()


def test_its_workers_are_described(ended: Diagnosed) -> None:
    (loader,) = ended.evidence.loaders
    assert [worker.worker for worker in loader.workers] == [0, 1]
    assert loader.place is not None and loader.place.file == "train.py"


@pytest.mark.parametrize("num_steps", [1, 4])
def test_an_evaluation_that_goes_on_after_the_time_is_ended_and_named(tmp_path: Path, num_steps: int) -> None:
    body = f"""
    from pathlib import Path
    from flatout.measure.run import observer
    observer.OVERDUE_S = 0.5
    def evaluate():
        while True:
            sum(range(1000))
    try:
        for number, (x, y) in enumerate(DataLoader(data, batch_size=16), 1):
            train_step(x, y)
            if number == {num_steps}:
                evaluate()
    finally:
        Path("finally.txt").write_text("ran")
    """
    done = diagnosed(tmp_path, body, "--seconds", "1")
    assert (tmp_path / "finally.txt").read_text() == "ran"
    assert done.evidence.job.ended == "measured"
    (reason,) = (each for each in done.evidence.missing if each.startswith("the step under way"))
    assert "train.py:" in reason
    if num_steps == 1:
        assert done.ran.code == 2 and "the time was up before a step was measured" in done.ran.stderr
    else:
        assert len(done.evidence.steps) == num_steps  # the last one did not end


def test_a_module_that_swallows_everything_is_ended_by_force(tmp_path: Path) -> None:
    """And it runs as `python -m` runs it: in its package, from the working folder."""
    package = tmp_path / "pkg"
    write_script(package / "__init__.py", "", preamble="")
    write_script(package / "size.py", "BATCH_SIZE = 16\n", preamble="")
    body = """
    from .size import BATCH_SIZE
    print(__package__, sys.argv[1:])
    batches = iter(DataLoader(data, batch_size=BATCH_SIZE, num_workers=1))
    while True:
        try:
            x, y = next(batches, (None, None))
            if x is None:
                batches = iter(DataLoader(data, batch_size=BATCH_SIZE))
                continue
            train_step(x, y)
        except BaseException:
            pass
    """
    write_script(package / "train.py", body, preamble=BY_HAND)
    ran = diagnose("--save", "e.json", "--seconds", "60", "-m", "pkg.train", "--flag", folder=tmp_path)
    assert ran.code in (0, 1)
    assert ran.stdout.startswith("pkg ['--flag']\n")
    assert ran.left == ()
    assert "Traceback" not in ran.stderr
    evidence = load_evidence(tmp_path / "e.json")
    assert (evidence.job.ended, evidence.job.command) == ("measured", ("-m", "pkg.train", "--flag"))


def test_options_are_what_the_launching_process_sends() -> None:
    names = [field.name for field in dataclasses.fields(JobOptions)]
    assert names == [
        "command",
        "module",
        "folder",
        "evidence_path",
        "keep_running",
        "seconds",
        "skipped",
        "progress_fd",
        "failed_at",
        "began_s",
        "parent",
        "scratch",
    ]


def test_an_error_inside_a_model_shows_no_frame_of_the_instruments(tmp_path: Path) -> None:
    body = """
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise KeyError("first")

    try:
        Failing()(torch.zeros(1))
    except KeyError as error:
        raise ValueError("second") from error
    """
    write_script(tmp_path / "train.py", body, preamble=BY_HAND)
    ran = diagnose("train.py", folder=tmp_path)
    shown = [line.strip() for line in ran.stderr.splitlines() if line.startswith("  File ")]
    assert ran.code == 2
    assert [line.rpartition(" in ")[2] for line in shown if "train.py" in line] == [
        "<module>",
        "forward",
        "<module>",
    ]
    assert all("train.py" in line or "torch" in line for line in shown)


def test_a_script_that_does_not_parse_shows_its_own_line_alone(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", "for step in range(3)\n    pass\n", preamble="")
    ran = diagnose("train.py", folder=tmp_path)
    assert ran.code == 2
    (place,) = [line for line in ran.stderr.splitlines() if line.startswith("  File ")]
    assert place.endswith('train.py", line 1')


# On a busy machine the processes of a script get little of the time.
ANY_TIME_COUNTS = "from flatout.measure.run.ranks import other_trainers; other_trainers.LEAST_S = 0.02"


def test_a_script_that_trains_in_processes_of_its_own_is_told_what_watches_them(tmp_path: Path) -> None:
    body = f"""
    import multiprocessing, time
    {ANY_TIME_COUNTS}

    def compute():
        while time.process_time() < 0.1:
            pass

    process = multiprocessing.get_context("fork").Process(target=compute)
    process.start()
    process.join()
    """
    write_script(tmp_path / "train.py", body, preamble=BY_HAND)
    ran = diagnose("train.py", folder=tmp_path)
    (line,) = ran.stderr.splitlines()
    assert ran.code == 2
    assert "without a training step; processes that the script started computed for" in line
    assert line.endswith("torchrun -m flatout diagnose watches every rank it starts")


def test_a_script_that_waits_for_ever_for_processes_that_train_ends_with_the_time(tmp_path: Path) -> None:
    """A3C: the script itself waits for results, and its processes share the model and train it."""
    body = f"""
    import torch, torch.multiprocessing as mp
    {ANY_TIME_COUNTS}

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while True:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    if __name__ == "__main__":
        model = torch.nn.Linear(4, 1).share_memory()
        processes = [mp.Process(target=train, args=(model,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    """
    write_script(tmp_path / "train.py", body, preamble="")
    ran = diagnose("--seconds", "2", "train.py", folder=tmp_path)
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("flatout: train.py")]
    assert ran.code == 2
    assert "the time was up before a step was measured; processes that the script started computed" in line
    assert "let the script itself call what one of them runs" in line


def test_a_process_that_it_forks_and_that_comes_to_its_end_is_not_the_job(tmp_path: Path) -> None:
    body = """
    child = os.fork()
    if child == 0:
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("forked:", code, os.path.exists("e.json"))
    for x, y in DataLoader(data, batch_size=16):
        train_step(x, y)
    """
    done = diagnosed(tmp_path, body, preamble=BY_HAND)
    assert done.ran.stdout.startswith("forked: 7 False\n")
    assert (done.evidence.job.ended, done.evidence.job.exit_code) == ("finished", 0)


@pytest.mark.parametrize(
    ("ending", "laid_to_the_arm"),
    [
        (Ending("crashed", 1, "RuntimeError: shapes"), True),
        (Ending("crashed", 1, "ValueError: seen before"), True),  # two arms may break the same thing
        (Ending("finished", 3), False),
        (Ending("finished", 4), True),
        (Ending("finished", 0), False),
        (Ending("interrupted", 130), False),
    ],
)
def test_an_exit_that_comes_again_under_another_arm_is_the_scripts_own(
    ending: Ending, laid_to_the_arm: bool, tmp_path: Path
) -> None:
    observed = failed_before(tmp_path)
    arm = object()
    observed.observer = SimpleNamespace(arm_under_way=arm)  # type: ignore[assignment]
    assert observed._failed_arm(ending) is (arm if laid_to_the_arm else None)


def test_an_error_that_comes_again_while_no_arm_runs_acquits_the_arm_it_came_under(tmp_path: Path) -> None:
    observed = failed_before(tmp_path)
    assert observed.observer.options.plain_steps == 62  # as they are, past both failures
    observed.observer = SimpleNamespace(arm_under_way=None)  # type: ignore[assignment]
    assert observed._acquitted(Ending("crashed", 1, "ValueError: seen before")) == ["cached"]
    assert observed._acquitted(Ending("crashed", 1, "ValueError: another")) == []


def failed_before(folder: Path) -> Session:
    """A run of a script that left in two ways under two arms before."""
    failed = "the script failed under it: "
    options = JobOptions(
        command=("train.py",),
        module=False,
        folder=str(folder),
        evidence_path=str(folder / "e.json"),
        keep_running=False,
        seconds=1.0,
        skipped={"half": f"{failed}ended with exit code 3", "cached": f"{failed}ValueError: seen before"},
        failed_at={"half": 50, "cached": 60},
        progress_fd=None,
    )
    return Session(options, at_start=())


def test_saving_what_is_known_takes_a_tenth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[float] = []
    clock = SimpleNamespace(now_s=0.0)

    def save(_evidence: Any, _path: Path) -> None:
        saved.append(clock.now_s)
        clock.now_s += 2.0

    monkeypatch.setattr(session, "save_evidence", save)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    observed: Any = Session.__new__(Session)
    observed.assembly = SimpleNamespace(evidence=lambda *_arguments, **_options: None)
    observed.options = SimpleNamespace(evidence_path="e.json")
    observed.observer, observed._next_save_s = None, 0.0
    for _block in range(50):
        observed.block_ended()
        clock.now_s += 1.0
    assert 2 <= len(saved) <= 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("\n\n-- Process 0 ended\nTraceback"), "ValueError: -- Process 0 ended"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_is_named_by_its_first_words(error: Exception, words: str) -> None:
    assert session._words(error) == words
