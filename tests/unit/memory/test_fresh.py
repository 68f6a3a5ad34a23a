"""Which process may use CUDA: a forked child, or one that starts from nothing."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from flatout.errors import BadInput, ChildDied
from flatout.memory.child import run_in_child
from flatout.memory.fresh import (
    ForkUnusable,
    check_backward,
    check_build,
    check_cuda,
    in_fresh_process,
    spawned,
)

needs_no_gpu = pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
CUDA_WAS_USED = False  # a forked child inherits what a test sets here, a spawned one does not
WHAT = "a look"


def needs_cuda() -> int:
    if CUDA_WAS_USED:
        raise ForkUnusable("CUDA was used before this process was forked")
    return os.getpid()


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("used", [False, True])
def test_where_a_fork_cannot_use_cuda_a_spawned_process_answers(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys.modules[__name__], "CUDA_WAS_USED", used)
    assert in_fresh_process(needs_cuda, what=WHAT) != os.getpid()
    if used:
        with pytest.raises(ForkUnusable):
            run_in_child(needs_cuda)


def test_a_job_that_cannot_be_sent_is_refused_with_a_way_on() -> None:
    with pytest.raises(BadInput, match="cannot be sent to another") as caught:
        spawned(lambda: 1, what=WHAT)
    assert WHAT in str(caught.value.hint)


def test_a_spawned_process_answers() -> None:
    assert spawned(os.getpid, what=WHAT) != os.getpid()


def test_errors_of_a_spawned_process_are_those_of_a_forked_one() -> None:
    with pytest.raises(BadInput, match="batch_size=0"):
        spawned(raise_, BadInput("batch_size=0 is below 1"), what=WHAT)
    with pytest.raises(BadInput, match="the step raised KeyError") as caught:
        spawned(raise_, KeyError("input_ids"), what=WHAT)
    assert f"at {__file__}:{raise_.__code__.co_firstlineno + 1}" in str(caught.value.hint)


def test_a_spawned_process_that_dies_is_reported() -> None:
    with pytest.raises(ChildDied, match="said nothing"):
        spawned(os._exit, 3, what=WHAT)


@needs_no_gpu
def test_a_build_without_cuda_starts_no_process() -> None:
    for ask in (lambda: in_fresh_process(os.getpid, what=WHAT), lambda: check_build(WHAT)):
        with pytest.raises(BadInput, match=r"^a look needs a CUDA GPU; this build of torch has no CUDA"):
            ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_child_says_that_torch_sees_no_gpu() -> None:
    with pytest.raises(BadInput, match="a look needs a CUDA GPU; torch sees none here"):
        run_in_child(check_a_look)


def check_a_look() -> None:
    check_cuda(0, what=WHAT)


def test_a_child_whose_backward_runs_is_of_use() -> None:
    assert run_in_child(check_backward) is None
