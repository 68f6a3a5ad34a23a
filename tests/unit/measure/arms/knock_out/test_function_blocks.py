"""Blocks of a small job taken away in a whole diagnosis."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.measure.arms.knock_out import function_blocks
from flatout.measure.arms.knock_out.blocks import find_function, inner_blocks, whole_block
from flatout.measure.arms.knock_out.function_blocks import FunctionBlock, UserFunction, recomputed
from flatout.measure.arms.knock_out.knock_out import Shares
from flatout.measure.arms.knock_out.rewrite import parse_file
from flatout.measure.clock import Clock
from flatout.measure.evidence import Counterfactual, Evidence, Place, Site, StackPath, Stacks
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import Observer, ObserverOptions

SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.embed(x)
        rows = []
        for i in range(len(x)):  # at: loop
            for _ in range(12):
                row = hidden[i] * 2
            rows.append(row)
        joined = torch.stack(rows)
        return self.out(joined)

def noise(x):  # at: noise
    for _ in range(150):
        x = x + torch.rand(4)
    return torch.distributions.Normal(x, 1.0)

def train_step(model, optimizer, x):
    loss = model(x + noise(x).mean).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def lines() -> dict[str, int]:
    numbered = enumerate(textwrap.dedent(SOURCE).splitlines(), start=1)
    return {text.partition("# at: ")[2]: number for number, text in numbered if "# at: " in text}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(textwrap.dedent(SOURCE))
    spec = importlib.util.spec_from_file_location("job", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["job"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["job"]


@pytest.fixture(scope="module")
def evidence(job: ModuleType) -> Evidence:
    folder = str(Path(str(job.__file__)).parent)
    options = ObserverOptions(folder=folder, proposers=(function_blocks.propose,))
    observer = Observer(options)
    codes = (job.Model.forward.__code__, job.noise.__code__)
    observer.install()
    try:
        model = job.Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        while not observer.finished:
            job.train_step(model, optimizer, torch.ones(24, 4))
    finally:
        observer.remove()
    assert (job.Model.forward.__code__, job.noise.__code__) == codes
    return Assembly(command=("job.py",), folder=folder).evidence(observer, Ending("measured", 0))


def at(evidence: Evidence, name: str) -> Counterfactual:
    (found,) = [each for each in evidence.counterfactuals if each.place and each.place.line == lines()[name]]
    return found


def test_the_loop_and_its_backward_pass_are_taken_away_whole(evidence: Evidence) -> None:
    loop = at(evidence, "loop")
    assert (loop.kind, loop.baseline, loop.last_line) == ("knock-out", "real", lines()["loop"] + 4)
    assert loop.function == "Model.forward"
    assert loop.speedup_low > 1.3
    assert loop.roofline_s is not None and loop.roofline_s < loop.step_s
    assert loop.parent is not None and loop.parent.startswith("knock-out job.py:")


def test_a_block_whose_result_is_not_plain_says_so(evidence: Evidence) -> None:
    (noise,) = [each for each in evidence.arms_not_run if each.place and each.place.line == lines()["noise"]]
    assert noise.reason == "its result what it returns is a Normal, not a tensor or a plain value"


def test_what_trains_is_opened_and_its_statements_tried(evidence: Evidence) -> None:
    reasons = {arm.label: arm.reason for arm in evidence.arms_not_run}
    trains = [label for label, reason in reasons.items() if reason == "it trains, or steps an environment"]
    assert len(trains) == 1
    assert any(each.function == "train_step" for each in evidence.counterfactuals)


BEHIND = """
def train_step(step_end):
    step_end()
    total = sum([number for number in range(3)])
    ran.append(total)
"""


def test_a_block_behind_the_end_of_the_step_runs_on_after_the_last_of_them(tmp_path: Path) -> None:
    """Steps end inside its function: that goes on with the switch, though the arm is over."""
    path = tmp_path / "train.py"
    path.write_text(BEHIND)
    names: dict[str, Any] = {"ran": []}
    exec(compile(BEHIND, str(path), "exec"), names)
    train_step = names["train_step"]
    code, tree = train_step.__code__, parse_file(str(path))
    assert tree is not None
    node = find_function(tree, "train_step", 2)
    assert node is not None
    function = UserFunction(code, (train_step,), str(path), "train.py", node, tree)
    (block,) = [each for each in inner_blocks(node, whole_block(node, tree), tree) if each.first_line == 4]
    context: Any = SimpleNamespace(clock=Clock(), optimizers=(), device="cpu", stacks=None, step_s=1.0)
    arm = FunctionBlock(context, Shares(context), function, block, suspicion=1.0)
    for end in (arm.begin, arm.step_end, arm.step_end, arm.step_end, arm.end, lambda: None):
        train_step(end)
    assert names["ran"] == [3] * 6
    assert arm.refusal is None
    assert train_step.__code__ is code


def test_what_a_checkpoint_computes_again_is_left_alone() -> None:
    names = ("Model.forward", "f", "main", "step", "hook")
    here, inner, main, step, hook = (
        Place(file="m.py", line=line, function=name) for line, name in enumerate(names, start=3)
    )
    context: Any = SimpleNamespace(
        sites=(Site(kind="call", op="checkpoint", place=here, via=None, calls_per_step=2.0),),
        stacks=Stacks(
            num_steps=1,
            samples_by_phase={},
            paths=(
                StackPath(phase="forward", places=(here, inner), samples=9),
                StackPath(phase="backward", places=(main, step), samples=9),
                StackPath(phase="backward", places=(main, step, hook), samples=9),
                StackPath(phase="rest", places=(Place(file="m.py", line=20, function="log"),), samples=9),
            ),
        ),
    )
    assert set(recomputed(context)) == {("m.py", "f"), ("m.py", "hook")}, "what calls backward stays"
