from __future__ import annotations

import sys
import textwrap
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatout.ground.script import main as main_script
from flatout.measure.arms.knock_out.leave_out import NOTHING, SWITCH, LeaveOut, Statement
from flatout.measure.evidence import Place, StackPath, Stacks
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

LOOP = '''
"""A training loop of words."""

from __future__ import annotations

import torch


class Model:
    def backward(self):
        seen.extend(["backward"])


seen = []
model = Model()
for step in range(6):
    value = len(str(step))
    model.backward()
    seen.append(
        f"log {value}"
    )
    if step == 4:
        break
    at(step)
'''


class Job:
    """A script under switches; `at(step)` is called at the end of each step."""

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / "train.py"
        self.path.write_text(textwrap.dedent(source))
        self.arm = LeaveOut(UserCode(str(folder)))
        self.patches = Patches()
        self.arm.install(self.patches)

    def line_of(self, part: str) -> int:
        lines = self.path.read_text().splitlines()
        (number,) = [n for n, text in enumerate(lines, start=1) if text.strip().startswith(part)]
        return number

    def lines(self) -> list[int]:
        return [statement.first_line for statement in self.arm.statements]

    def statement(self, part: str) -> Statement:
        line = self.line_of(part)
        return next(each for each in self.arm.statements if each.first_line == line)

    def run(self, *, left_out: str, at_step: int = 1) -> Any:
        """Run it as a module that no list of modules has; from `at_step` on the statement is left out."""

        def at(step: int) -> None:
            if step == at_step:
                self.arm.switch(self.statement(left_out))

        names = {"__name__": "script", "at": at}
        try:
            exec(main_script.read_code(str(self.path)), names)
            return names
        finally:
            self.patches.undo()


def test_a_statement_is_passed_over_from_then_on(tmp_path: Path) -> None:
    seen = Job(tmp_path, LOOP).run(left_out="seen.append(")["seen"]
    assert seen == ["backward", "log 1"] * 2 + ["backward"] * 3


def test_every_statement_runs_again_after_the_loop_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP)
    names = job.run(left_out="seen.append(")
    assert names[SWITCH] == job.statement("seen.append(").number
    job.arm.switch(None)
    assert names[SWITCH] == NOTHING


def test_a_variable_keeps_the_value_of_the_step_before(tmp_path: Path) -> None:
    source = LOOP.replace("len(str(step))", "abs(step)")
    seen = Job(tmp_path, source).run(left_out="value =", at_step=2)["seen"]
    assert [each for each in seen if each != "backward"] == ["log 0", "log 1", "log 2", "log 2", "log 2"]


def test_only_statements_beside_training_that_stay_in_the_loop_have_a_switch(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP)
    job.run(left_out="seen.append(")
    assert job.lines() == [job.line_of(part) for part in ("value =", "seen.append(", "at(step)")]
    statement = job.arm.statements[1]
    assert (statement.first_line, statement.last_line) == (job.line_of("seen.append("), job.line_of(")"))


def test_lines_of_a_traceback_are_those_of_the_source(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP.replace('f"log {value}"', "1 / 0"))
    with pytest.raises(ZeroDivisionError) as caught:
        job.run(left_out="seen.append(")
    assert caught.traceback[-1].lineno + 1 == job.line_of("1 / 0")


def test_in_a_function_for_one_step_nothing_is_left_out_that_is_read_later(tmp_path: Path) -> None:
    source = """
    def train_step(loss):
        total = float(loss)
        print(sum([1, 2]))
        loss.backward()
        return total

    def plain(loss):
        print(loss)

    class Trainer:
        def step(self, loss):
            loss.backward()
            self.count = len("one")

    @compiled
    def decorated(loss):
        print(loss)
        loss.backward()
    """
    job = Job(tmp_path, source)
    with pytest.raises(NameError, match="compiled"):
        job.run(left_out="none")
    assert job.lines() == [job.line_of("print(sum"), job.line_of("self.count")]


@pytest.mark.parametrize(
    "statement",
    [
        "if enough(): break",
        "return log()",
        "yield log()",
        "import json; json.dumps(1)",
        "def inner(): log()",
        "total = 1",
        "loss.backward()",
        "for each in range(3): optimizer.step()",
        "with log(): continue",
    ],
)
def test_statements_that_leave_or_train_are_left_alone(tmp_path: Path, statement: str) -> None:
    source = f"def train(loss):\n    while True:\n        loss.backward()\n        {statement}\n"
    job = Job(tmp_path, source)
    job.run(left_out="none")
    assert [line for line in job.lines() if "json" not in statement] == []


def test_a_module_is_compiled_with_switches_and_no_bytecode_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, LOOP.replace("at(step)", "print(step)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    try:
        module: ModuleType = __import__("train")
        assert vars(module)[SWITCH] == NOTHING
        assert len(job.arm.statements) == 3
        assert not list(tmp_path.rglob("*.pyc"))
    finally:
        job.patches.undo()
        monkeypatch.delitem(sys.modules, "train", raising=False)


def test_a_file_without_a_training_loop_and_a_broken_one_are_pythons(tmp_path: Path) -> None:
    job = Job(tmp_path, "print('nothing to train')\n")
    names = job.run(left_out="none")
    assert SWITCH not in names
    broken = Job(tmp_path, "for step in range(3)\n    pass\n")
    with pytest.raises(SyntaxError):
        broken.run(left_out="none")


def test_an_expression_too_deep_to_walk_is_pythons(tmp_path: Path) -> None:
    total = " + ".join(["1"] * 1500)
    job = Job(tmp_path, f"total = {total}\nif total < 0:\n    loss.backward()\n")
    assert job.run(left_out="none")["total"] == 1500


@pytest.mark.parametrize("call", ["optimizer.step", "print"])
def test_a_warning_of_the_compiler_is_given_once(tmp_path: Path, call: str) -> None:
    job = Job(tmp_path, f"def train():\n    for _ in '\\d':\n        {call}()\n        print(_ is 5)\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.run(left_out="none")
    assert bool(job.lines()) == (call == "optimizer.step")
    assert sorted(warning.lineno for warning in caught) == [2, 4]


# The choice


def stacks(*paths: tuple[str, int, int]) -> Stacks:
    """(phase, line, samples) of paths of one line."""
    made = tuple(
        StackPath(phase=phase, places=(Place(file="train.py", line=line),), samples=samples)
        for phase, line, samples in paths
    )
    rest = sum(path.samples for path in made if path.phase == "rest")
    return Stacks(num_steps=3, samples_by_phase={"rest": rest}, paths=made)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path, LOOP)
    made.run(left_out="seen.append(")
    return made


def heavy(job: Job, found: Stacks, rest_share: float) -> dict[int, float]:
    return {each.first_line: share for each, share in job.arm.heavy(found, rest_share=rest_share)}


def test_heavy_statements_are_found_with_their_share_of_the_step(job: Job) -> None:
    log, value = job.line_of('f"log {value}"'), job.line_of("value =")
    found = heavy(job, stacks(("rest", log, 70), ("rest", value, 30)), 0.5)
    assert found == {job.line_of("seen.append("): pytest.approx(0.35), value: pytest.approx(0.15)}


def test_nothing_is_heavy_where_little_time_is_spent_or_a_phase_runs_inside(job: Job) -> None:
    log = job.line_of('f"log {value}"')
    assert not heavy(job, stacks(("rest", log, 70)), 0.05)
    assert not heavy(job, stacks(("rest", log, 70), ("forward", log, 5)), 0.9)
    assert not heavy(job, stacks(), 0.9)
