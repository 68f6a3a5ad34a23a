"""A child process: its answer, its errors, and its death."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.errors import BadInput, ChildDied, FlatoutError, StructureChanges
from flatout.memory.process.child import run_in_child

CHANGED: list[int] = []


def change_this_process() -> int:
    CHANGED.append(1)
    return os.getpid()


def raise_(error: BaseException) -> None:
    raise error


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
