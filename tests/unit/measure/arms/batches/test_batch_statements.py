"""Which statements make the batch, and what a job sees of their switches."""

from __future__ import annotations

import ast
import pickle
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.measure.arms.arm import Arm
from flatout.measure.arms.batches import batch_statements
from flatout.measure.arms.batches.batch_statements import SWITCH, BatchStatements
from flatout.measure.batches import KeptBatch
from flatout.measure.clock import Clock
from flatout.measure.evidence import ModuleCall, Place
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.user_code import UserCode

GET_BATCH = """
    for step in range(6):
        x, y = get_batch()
        out = model(x)  # model
        loss = loss_of(out, y)
        loss.backward()
        optimizer.step()
"""
AHEAD = """
    x, y = get_batch()
    for step in range(6):
        for part in range(2):
            out = model(x)  # model
            loss = loss_of(out, y)
            x, y = get_batch()
            loss.backward()
        optimizer.step()
"""
IN_A_FUNCTION = """
    def train_step():
        x, y = get_batch()
        out = model(x)  # model
        loss_of(out, y).backward()
        optimizer.step()

    for step in range(6):
        train_step()
"""
REPLAY = """
    state = 0
    for step in range(6):
        action = model(torch.ones(1, 3) * state)  # model
        state = simulate(action)
        x, y = get_batch()
        out = model(x)  # model
        loss = loss_of(out, y)
        loss.backward()
"""
STATE = """
    state = torch.zeros(8, 3)
    for step in range(6):
        x, y = get_batch()
        state = detach(state)
        out = state = model(x + state)  # model
        loss = loss_of(out, y)
        loss.backward()
"""
POSITIONS = """
    out = 0
    for step in range(6):
        x, y = get_batch()
        state = 0
        first = model(x)  # model
        for i in range(2):
            out = state = model(first[i] + state)  # model
        out = model(out)  # model
        loss = loss_of(out, y)
        loss.backward()
"""
ON_ONE_LINE = """
    i = out = 0
    for step in range(6):
        x, y = get_batch()
        i += 1; out = model(x); loss = loss_of(out, y)  # model
        loss.backward()
"""
NUMBERED = """
    for step in range(6):
        x, y = get_batch()
        parts = [model(x[i]) for i in range(2)]  # model
        loss = sum(parts)
        loss.backward()
"""
WHOLE = """
    x, y = get_batch()
    for step in range(6):
        out = model(x)  # model
        loss = loss_of(out, y)
        loss.backward()
"""
EPISODES = """
    for step in range(6):
        total, state = 0, simulate(None)
        for turn in range(4):
            out = model(torch.ones(8, 3) * state)  # model
            state = simulate(out)
            total = total + out
        rewards = get_batch()
        loss = loss_of(total, rewards[1])
        loss.backward()
"""


class Job:
    """A loop that was compiled with switches, and what its parts were called with."""

    def __init__(self, source: str, folder: Path) -> None:
        path = folder / "train.py"
        path.write_text(text := textwrap.dedent(source))
        self.user_code = UserCode(str(folder))
        self.loaders = LoaderWatch(Clock(), self.user_code)
        self.statements = BatchStatements(self.user_code, self.loaders)
        tree = ast.parse(text, str(path))
        self.statements.rewrite(tree, self.user_code.absolute(str(path)))
        self.code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        self.lines = [number for number, line in enumerate(text.splitlines(), 1) if "# model" in line]
        self.rows: list[tuple[int, int]] = []
        self.num_batches = 0
        self.arm: Arm | None = None

    def get_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_batches += 1
        return torch.ones(8, 3), torch.zeros(8)

    def loss_of(self, out: torch.Tensor, y: torch.Tensor) -> Any:
        self.rows.append((len(out), len(y)))
        if self.arm is not None:
            self.arm.step_end()
        return SimpleNamespace(backward=lambda: None)

    def run(self, arm: Arm | None = None, **names: Any) -> None:
        self.arm = arm
        if arm is not None:
            arm.begin()
        batch_statements.installed = self.statements
        given = {
            "torch": torch,
            "model": lambda x: x.sum(1, keepdim=True) * torch.ones(1, 3),
            "optimizer": SimpleNamespace(step=lambda: None),
            "get_batch": self.get_batch,
            "loss_of": self.loss_of,
            "simulate": lambda action: 1.0,
            "detach": torch.Tensor.detach,
            "app": SimpleNamespace(main=lambda config: lambda function: function),
            **names,
        }
        exec(self.code, given)
        if arm is not None:
            arm.end()

    def arms(self) -> tuple[Any, Any]:
        calls = [
            ModuleCall(
                module="M", place=Place(file="train.py", line=line), calls_per_step=1, rows=8, training=True,
                has_parameters=True,
            )
            for line in self.lines
        ]  # fmt: skip
        context: Any = SimpleNamespace(
            module_calls=calls, stacks=None, batch_statements=self.statements, loaders=self.loaders
        )
        cached, half = batch_statements.propose(context)
        return cached, half


@pytest.fixture(autouse=True)
def uninstall() -> Iterator[None]:
    yield
    batch_statements.installed = None


OF_AN_ENTRY_POINT = IN_A_FUNCTION.replace("    def ", "    @app.main(config='conf')\n    def ", 1)


@pytest.mark.parametrize("source", [GET_BATCH, IN_A_FUNCTION, REPLAY, OF_AN_ENTRY_POINT])
def test_a_batch_is_made_once_and_then_served_whole_or_halved(tmp_path: Path, source: str) -> None:
    job = Job(source, tmp_path)
    job.run()
    assert (job.num_batches, set(job.rows)) == (6, {(8, 8)})
    cached, half = job.arms()
    assert (cached.refusal, half.refusal) == (None, None)
    assert (cached.kind, cached.baseline, half.kind, half.baseline) == ("cached", "real", "half", "cached")
    assert "get_batch" in (tmp_path / "train.py").read_text().splitlines()[cached.place.line - 1]
    job.num_batches = 0
    job.run(cached)
    assert job.num_batches == 1
    job.rows.clear()
    job.run(half)
    assert (half.refusal, job.rows[1:]) == (None, [(4, 4)] * 5)  # the first step of a block is not timed
    job.num_batches = 0
    job.run()
    assert job.num_batches == 6


def test_a_lazy_matrix_with_gradients_is_not_a_batch(tmp_path: Path) -> None:
    """It has `detach` and the like, but it is not a tensor, and its graph lasts for one step."""

    class Lazy:
        shape, dtype, requires_grad = (8, 3), torch.float32, True

        def detach(self) -> Lazy:
            return self

        def __getitem__(self, index: int) -> Lazy:
            return self

    job = Job(GET_BATCH, tmp_path)
    job.run()
    cached, _ = job.arms()
    job.num_batches = 0
    lazily = lambda: (job.get_batch()[0], Lazy())  # noqa: E731
    job.run(cached, get_batch=lazily, loss_of=lambda out, y: job.loss_of(out, out))
    assert job.num_batches == 6
    assert "gradients flow into what they make" in (cached.refusal or "")
    assert KeptBatch([Lazy()]).serve() is not None


def test_each_of_several_batches_in_a_step_is_kept(tmp_path: Path) -> None:
    job = Job(AHEAD, tmp_path)
    job.run()
    cached, _ = job.arms()
    ends = iter([False, True] * 6)
    step_end, cached.step_end = cached.step_end, lambda: step_end() if next(ends, True) else None
    job.num_batches = 0
    job.run(cached)
    assert job.num_batches == 1 + 2  # before the loop, and those of the first step


def test_a_state_that_the_model_made_is_neither_kept_nor_halved(tmp_path: Path) -> None:
    job = Job(STATE, tmp_path)
    cached, half = job.arms()
    assert half.refusal == "the model also takes what an earlier step made (state)"
    detached: list[int] = []
    job.run(cached, detach=lambda state: (detached.append(1), state.detach())[1])
    assert (job.num_batches, len(detached)) == (1, 6)


@pytest.mark.parametrize("source", [POSITIONS, ON_ONE_LINE, NUMBERED])
def test_what_the_same_step_made_is_not_from_an_earlier_one(tmp_path: Path, source: str) -> None:
    """The counter of an inner loop, the output of its last turn, and names that share the model's line."""
    job = Job(source, tmp_path)
    _, half = job.arms()
    assert half.refusal is None


def test_a_state_that_only_an_inner_loop_renews_is_from_an_earlier_step(tmp_path: Path) -> None:
    job = Job(POSITIONS.replace("state = 0", "pass"), tmp_path)
    _, half = job.arms()
    assert half.refusal == "the model also takes what an earlier step made (out, state)"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (WHOLE, "no assignment directly in the training loop makes the model's input"),
        (WHOLE.replace("# model", ""), "too few steps were measured to see where the model is called"),
        (EPISODES, "the model is called in a separate loop"),
    ],
)
def test_a_loop_that_makes_no_batch_is_refused_by_name(tmp_path: Path, source: str, reason: str) -> None:
    job = Job(source, tmp_path)
    job.run()
    for arm in job.arms():
        assert arm.refusal.startswith("no DataLoader is trained on, and ")
        assert reason in arm.refusal


def test_batches_too_small_to_halve_are_said_and_run_as_they_are(tmp_path: Path) -> None:
    job = Job(GET_BATCH, tmp_path)
    _, half = job.arms()
    job.run(half, get_batch=lambda: (torch.ones(3, 3), torch.ones(3)))
    assert half.refusal == "batches of 3 are too small for it"
    assert set(job.rows) == {(3, 3)}


def test_a_batch_that_the_script_changes_in_place_is_served_as_it_was_made(tmp_path: Path) -> None:
    job = Job(GET_BATCH.replace("model(x)", "model(x.mul_(2))"), tmp_path)
    seen: list[float] = []
    cached, _ = job.arms()
    job.run(cached, model=lambda x: (seen.append(x.max().item()), x)[1])
    assert set(seen) == {2.0}


def test_lines_keep_their_numbers_and_errors_their_place(tmp_path: Path) -> None:
    job = Job(GET_BATCH, tmp_path)

    def fail() -> None:
        raise KeyError("no data")

    with pytest.raises(KeyError) as raised:
        job.run(get_batch=fail)
    frames = traceback.extract_tb(raised.tb)
    assert [frame.lineno for frame in frames if frame.filename.endswith("train.py")] == [3]


def test_in_another_process_the_switches_are_off(tmp_path: Path) -> None:
    job = Job(GET_BATCH, tmp_path)
    assert pickle.loads(pickle.dumps(job.statements)) is None  # noqa: S301 - ours
    batch_statements.installed = None
    names: dict[str, Any] = {"torch": torch, "get_batch": job.get_batch, "loss_of": job.loss_of}
    exec(job.code, {**names, "model": torch.nn.Identity(), "optimizer": SimpleNamespace(step=lambda: None)})
    assert job.num_batches == 6
    assert SWITCH in job.code.co_names


GENERATOR = """
    for number, (x, y) in enumerate(batches()):
        out = model(x)  # model
        loss = loss_of(out, y)
        loss.backward()
"""


def test_a_loop_over_a_generator_is_watched_as_a_loader(tmp_path: Path) -> None:
    job = Job(GENERATOR, tmp_path)
    made: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(12):
            made.append(number)
            yield torch.full((8, 3), float(number)), torch.zeros(8)

    def trained(out: torch.Tensor, y: torch.Tensor) -> Any:
        job.loaders.num_steps += 1
        watch = job.loaders
        watch.keeping = watch.num_steps <= 4
        watch.begin_serving({5: "cached", 8: "half", 12: None}.get(watch.num_steps, watch.serving))
        return job.loss_of(out, y)

    job.run(batches=batches, loss_of=trained)
    record = job.loaders.trained_on()
    assert record is not None and record.place == Place(file="train.py", line=2, function=None)
    assert job.rows[8:12] == [(4, 4)] * 4
    assert len(job.rows) == 12 + 7  # kept batches stood in for those that the generator would have made
    assert made == list(range(12))


def test_what_holds_no_batches_is_iterated_as_it_is(tmp_path: Path) -> None:
    source = GENERATOR.replace("number, (x, y) in enumerate(batches())", "x, y in enumerate(names)")
    job = Job(source.replace("model(x)", "model(torch.ones(8, 3))").replace("y)", "'')"), tmp_path)
    job.run(names=iter("abc"))
    assert len(job.rows) == 3
    assert job.loaders.records == []


def test_a_loop_without_a_statement_to_serve_runs(tmp_path: Path) -> None:
    job = Job("for step in range(3):\n    optimizer.step()\n    steps.append(step)\n", tmp_path)
    steps: list[int] = []
    job.run(steps=steps)
    assert steps == [0, 1, 2]


def test_environments_that_are_stepped_in_a_loop_take_their_actions_from_it(tmp_path: Path) -> None:
    job = Job("for action in iter(actions):\n    simulator.step(action)\n", tmp_path)
    taken: list[Any] = []
    job.run(actions=[torch.ones(2), torch.zeros(2)], simulator=SimpleNamespace(step=taken.append))
    assert len(taken) == 2
    assert job.loaders.records == []
