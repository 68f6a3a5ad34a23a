from __future__ import annotations

import sys
import textwrap
import threading
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flatout.ground.script import main as main_script
from flatout.measure.arms.knock_out.kept_results import KeptResults
from flatout.measure.arms.knock_out.leave_out import NOTHING, SWITCH, LeaveOut, Statement, propose
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
        return [each.block.first_line for each in self.arm.statements if each.block.refusal is None]

    def statement(self, part: str) -> Statement:
        line = self.line_of(part)
        return next(each for each in self.arm.statements if each.block.first_line == line)

    def run(self, *, left_out: str, at_step: int = 1) -> Any:
        """Run it as a module that no list of modules has.

        The step after `at_step` keeps what the block computes, and from then on it is left out.
        """
        kept: list[KeptResults] = []

        def at(step: int) -> None:
            if step == at_step:
                chosen = self.statement(left_out)
                kept.append(KeptResults(chosen.block, owner=threading.get_ident, number=chosen.number))
                self.arm.switch(kept[0])
            elif kept:
                kept[0].reset()
                kept[0].giving = True

        names = {"__name__": "script", "at": at}
        try:
            exec(main_script.read_code(str(self.path)), names)
            return names
        finally:
            self.patches.undo()


def test_a_statement_is_passed_over_from_then_on(tmp_path: Path) -> None:
    seen = Job(tmp_path, LOOP).run(left_out="seen.append(")["seen"]
    assert seen == ["backward", "log 1"] * 3 + ["backward"] * 2


def test_every_statement_runs_again_after_the_loop_has_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP)
    names = job.run(left_out="seen.append(")
    assert names[SWITCH] == job.statement("seen.append(").number
    job.arm.switch()
    assert names[SWITCH] == NOTHING


def test_a_variable_keeps_the_value_of_the_step_before(tmp_path: Path) -> None:
    source = LOOP.replace("len(str(step))", "abs(step)")
    seen = Job(tmp_path, source).run(left_out="value =", at_step=1)["seen"]
    assert [each for each in seen if each != "backward"] == ["log 0", "log 1", "log 2", "log 2", "log 2"]


def test_only_statements_beside_training_that_stay_in_the_loop_have_a_switch(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP)
    job.run(left_out="seen.append(")
    assert job.lines() == [job.line_of(part) for part in ("value =", "seen.append(", "at(step)")]
    block = job.statement("seen.append(").block
    assert (block.first_line, block.last_line) == (job.line_of("seen.append("), job.line_of(")"))


def test_lines_of_a_traceback_are_those_of_the_source(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP.replace('f"log {value}"', "1 / 0"))
    with pytest.raises(ZeroDivisionError) as caught:
        job.run(left_out="seen.append(")
    assert caught.traceback[-1].lineno + 1 == job.line_of("1 / 0")


def test_what_is_called_anew_for_each_step_has_no_switch(tmp_path: Path) -> None:
    source = """
    def train_step(loss):
        print(sum([1, 2]))
        loss.backward()

    def train(losses):
        for loss in losses:
            print(loss)
            loss.backward()

    @compiled
    def decorated(losses):
        for loss in losses:
            print(loss)
            loss.backward()
    """
    job = Job(tmp_path, source)
    with pytest.raises(NameError, match="compiled"):
        job.run(left_out="none")
    assert job.lines() == [8]


GRAPH = """
import torch

weight = torch.ones(3, requires_grad=True)
embed = torch.ones(3, requires_grad=True)
losses, count = [], 0
for step in range(5):
    hidden = embed * torch.ones(3)
    rows = []
    for _ in range(3):
        count += 1
        rows.append(torch.mul(hidden, weight))
    loss = torch.stack(rows).sum()
    loss.backward()
    losses.append(loss.item())
    gradients = (weight.grad, embed.grad)
    weight.grad = embed.grad = None
    at(step)
"""


def test_a_loop_of_tensors_is_left_out_with_what_consumes_them_and_its_backward_pass(tmp_path: Path) -> None:
    names = Job(tmp_path, GRAPH).run(left_out="for _ in")
    assert names["count"] == 3 * 3
    assert names["losses"] == [9.0] * 5
    weight, embed = names["gradients"]
    assert weight.tolist() == embed.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "statement",
    [
        "if enough(): break",
        "return log()",
        "yield log()",
        "import json",
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
    assert job.lines() == []


def test_a_module_is_compiled_with_switches_and_no_bytecode_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, LOOP.replace("at(step)", "print(step)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    try:
        module: ModuleType = __import__("train")
        assert vars(module)[SWITCH] == NOTHING
        assert len(job.lines()) == 3
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


def test_blocks_are_proposed_by_their_share_of_the_step(tmp_path: Path) -> None:
    job = Job(tmp_path, LOOP)
    job.run(left_out="seen.append(")
    log, value = job.line_of('f"log {value}"'), job.line_of("value =")
    paths = [
        StackPath(phase="rest", places=(Place(file="train.py", line=n),), samples=s)
        for n, s in ((log, 70), (value, 4))
    ]
    found = Stacks(num_steps=3, samples_by_phase={"rest": 74, "forward": 26}, paths=tuple(paths))
    context: Any = SimpleNamespace(
        stacks=found,
        sites=(),
        attributed_step_s=None,
        left_out=job.arm,
        device="cpu",
        loaders=None,
        step_s=0.1,
    )
    (arm,) = propose(context)
    assert (arm.label, arm.last_line) == (
        f"knock-out train.py:{job.line_of('seen.append(')}",
        job.line_of(")"),
    )
    assert arm.suspicion == pytest.approx(0.7)
    context.device = "cuda"
    assert len(list(propose(context))) == 3  # the GPU's time shows in no sample
