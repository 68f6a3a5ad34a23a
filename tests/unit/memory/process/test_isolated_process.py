"""Which process may use CUDA or run a backward: a forked child, or one of the server."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.ground.errors import BadInput, ChildDied, FlatoutError, StructureChanges
from flatout.memory.process import isolated_process
from flatout.memory.process.isolated_process import (
    ForkUnusable,
    check_backward,
    check_build,
    check_cuda,
    run_in_child,
    run_isolated,
    run_on_server,
    run_with_cuda,
)

CUDA_WAS_USED = False  # a forked child inherits what a test sets here, one of the server does not
WHAT = "a look"


def needs_cuda() -> int:
    if CUDA_WAS_USED:
        raise ForkUnusable("CUDA was used before this process was forked")
    return os.getpid()


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("used", [False, True])
def test_where_a_fork_cannot_use_cuda_the_server_answers(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys.modules[__name__], "CUDA_WAS_USED", used)
    assert run_with_cuda(needs_cuda, what=WHAT) != os.getpid()
    if used:
        with pytest.raises(ForkUnusable):
            run_in_child(needs_cuda)


def test_a_process_that_has_used_cuda_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on a GPU cannot be read in a forked child, whatever is then computed with it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert run_isolated(os.getppid, what=WHAT) != os.getpid()


def test_a_job_that_cannot_be_sent_is_refused_with_a_way_on() -> None:
    with pytest.raises(BadInput, match="run a backward, and the job cannot be sent to another") as caught:
        run_on_server(len, threading.Lock(), what=WHAT)
    assert WHAT in str(caught.value.hint) and "\n" not in str(caught.value)


def test_errors_of_a_child_of_the_server_are_those_of_a_forked_one() -> None:
    with pytest.raises(BadInput, match="batch_size=0"):
        run_on_server(raise_, BadInput("batch_size=0 is below 1"), what=WHAT)
    with pytest.raises(BadInput, match="the step raised KeyError") as caught:
        run_on_server(raise_, KeyError("input_ids"), what=WHAT)
    assert f"at {__file__}:{raise_.__code__.co_firstlineno + 1}" in str(caught.value.hint)


def test_a_child_of_the_server_that_dies_is_reported() -> None:
    with pytest.raises(ChildDied, match="without an answer"):
        run_on_server(os._exit, 3, what=WHAT)


def test_a_build_without_cuda_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for ask in (lambda: run_with_cuda(os.getpid, what=WHAT), lambda: check_build(WHAT)):
        with pytest.raises(BadInput, match=r"^a look needs a CUDA GPU; this build of torch has no CUDA"):
            ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_child_says_that_torch_sees_no_gpu() -> None:
    with pytest.raises(BadInput, match="a look needs a CUDA GPU; torch sees none here"):
        run_on_server(check_a_look, what=WHAT)


def check_a_look() -> None:
    check_cuda(0, what=WHAT)


def test_a_child_whose_backward_runs_is_of_use() -> None:
    assert run_on_server(check_backward, what=WHAT) is None


# A job as people write it: a script without a guard that has trained a little, and a notebook in it.
SCRIPT = """\
import json
print("the script runs")
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
import flatout
from flatout.ground.errors import ForkUnusable
from flatout.memory.trace import make_trace
from flatout.memory.process.isolated_process import run_in_child

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())

def peak(model_or_step, **more):
    return flatout.plan(model_or_step, torch.randn(8, 256), device="A100-80GB", **more).peak_allocated_bytes

def refuse():
    raise ForkUnusable("a backward was run before this process was forked")

model, target = Net(256), torch.randn(8, 256)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = lambda model, batch: (model(batch) - target).square().mean()
peaks = [peak(model, loss=loss)]
with FakeTensorMode():  # where torch has CUDA, these make the first backward start threads, as a GPU does
    nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()
if torch.version.cuda is None:
    make_trace.check_backward = refuse
try:
    run_in_child(make_trace._prepare_process)
except ForkUnusable:
    print("a fork is of no use")
model(target).sum().backward()
optimizer.step()

def step(batch):
    return (model(batch) - target).square().mean()

notebook = {}
cell = "class Cell(Net): pass\\nmodel = Cell(256)\\nloss = lambda m, x: (m(x) - target).square().mean()"
exec(cell, {"Net": Net, "target": target}, notebook)
peaks += [peak(model, loss=loss, optimizer=optimizer), peak(step)]
peaks += [peak(notebook["model"], loss=notebook["loss"])]
print(json.dumps(peaks))
"""


def test_a_script_without_a_guard_is_planned_after_a_backward_and_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert (first, second) == ("the script runs", "a fork is of no use")
    peaks = json.loads(last)
    assert len(peaks) == 4 and len(set(peaks)) == 1, peaks


CHANGED: list[int] = []


def change_this_process() -> int:
    CHANGED.append(1)
    return os.getpid()


def call_a_layer_wrongly() -> Any:
    return torch.nn.Linear(3, 2)(torch.ones(2, 2))


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_answer_comes_back_and_the_change_stays_there() -> None:
    assert run_in_child(change_this_process) != os.getpid()
    assert CHANGED == []
    assert run_in_child(divmod, 17, 5) == (3, 2)
    assert run_in_child(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]


def test_an_answer_larger_than_a_pipe_comes_back_whole() -> None:
    assert run_in_child(bytes, 5_000_000) == bytes(5_000_000)


@pytest.mark.parametrize("kind", [BadInput, StructureChanges, FlatoutError])
def test_an_error_of_ours_is_raised_here_as_it_is(kind: type[FlatoutError]) -> None:
    with pytest.raises(kind) as caught:
        run_in_child(raise_, kind("batch_size=0 is below 1", hint="give a positive number"))
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == ("batch_size=0 is below 1", "give a positive number")


def test_an_error_of_the_model_names_its_first_line_and_its_place() -> None:
    with pytest.raises(BadInput) as caught:
        run_in_child(raise_, KeyError("input_ids\nand more"))
    assert "KeyError" in caught.value.message
    line = raise_.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line}" in str(caught.value.hint)


def test_the_place_is_the_line_of_the_model_not_of_pytorch() -> None:
    with pytest.raises(BadInput, match="RuntimeError") as caught:
        run_in_child(call_a_layer_wrongly)
    line = call_a_layer_wrongly.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line}" in str(caught.value.hint)


def test_an_error_within_pytorch_alone_has_the_place_where_it_was_raised() -> None:
    with pytest.raises(BadInput) as caught:
        run_in_child(torch.nn.Linear(3, 2), torch.ones(2, 2))
    assert os.path.dirname(torch.__file__) in str(caught.value.hint)


def test_a_child_killed_by_a_signal_is_said_to_have_died() -> None:
    with pytest.raises(ChildDied, match="code -9") as caught:
        run_in_child(end_by_signal)
    assert "memory" in str(caught.value.hint)


def test_a_child_that_leaves_is_said_to_have_died() -> None:
    with pytest.raises(ChildDied, match="code 3"):
        run_in_child(os._exit, 3)


def logged_by_a_wrong_width() -> list[str]:
    handler = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(8, 3) @ torch.ones(64, 64)
    logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_an_error_of_a_shape_is_not_logged_as_well() -> None:
    assert run_in_child(logged_by_a_wrong_width) == []
    assert logged_by_a_wrong_width() != []  # as PyTorch has it


class RefusedProcess:
    """A process that cannot be started at first."""

    def __init__(self, *, words: str, num_refusals: int) -> None:
        self.words, self.num_refusals = words, num_refusals

    def start(self) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise RuntimeError(self.words)


def test_a_fork_that_a_library_refuses_for_a_moment_is_tried_again() -> None:
    process = RefusedProcess(words="os.fork is unsafe while filelock is changing", num_refusals=2)
    isolated_process._start(process)
    assert process.num_refusals == 0
    with pytest.raises(RuntimeError, match="another"):
        isolated_process._start(RefusedProcess(words="another", num_refusals=1))
