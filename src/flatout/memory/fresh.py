"""Runs a function in a child process that may use CUDA, or run a backward on a machine with a GPU.

A process that has asked CUDA for anything, even for the number of GPUs, cannot fork a child that uses CUDA;
and after its first backward, with a GPU in the machine, none whose own backward would run.  The child is
forked where it can be, since a forked one is given models as they are; otherwise the work is sent to a
process that starts from nothing, which takes what is made of importable functions.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from flatout.errors import BadInput, ChildDied, ForkUnusable
from flatout.memory.child import answer_of, answered, run_in_child

Result = TypeVar("Result")


def in_fresh_process(function: Callable[..., Result], *args: Any, what: str) -> Result:
    """In a forked child; in a spawned one where CUDA was used here already.  `what` needs the GPU."""
    import torch

    check_build(what)
    if torch.cuda.is_initialized():
        return spawned(function, *args, what=what)
    return forked_or_spawned(function, *args, what=what)


def forked_or_spawned(function: Callable[..., Result], *args: Any, what: str) -> Result:
    """In a forked child; in a spawned one where the forked one says that it is of no use."""
    try:
        return run_in_child(function, *args)
    except ForkUnusable:
        return spawned(function, *args, what=what)


def spawned(function: Callable[..., Result], *args: Any, what: str) -> Result:
    """In a process that starts from nothing and imports what it is sent."""
    try:
        ForkingPickler.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise BadInput(
            f"this process has used a GPU or run a backward, and the job cannot be sent to another: {error}",
            hint=f"ask for {what} before that, or make the job of functions of an importable module",
        ) from error
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            answer = pool.submit(answer_of, function, args, {}).result()
        except BrokenProcessPool as error:
            raise ChildDied(
                "the process that was started for the model ended and said nothing",
                hint="the system may have run out of memory, or the job's module may not be importable",
            ) from error
    result: Result = answered(answer)
    return result


def check_build(what: str) -> None:
    """Refuse where no child could ever use CUDA; asks CUDA nothing."""
    import torch

    if torch.version.cuda is None:
        raise _no_gpu(what, "this build of torch has no CUDA")


def check_cuda(device_index: int, *, what: str) -> None:
    """In a child: whether it can use this GPU."""
    import torch

    if torch.cuda._is_in_bad_fork():
        raise ForkUnusable("CUDA was used before this process was forked")
    if not torch.cuda.is_available():
        raise _no_gpu(what, "torch sees none here")
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise BadInput(f"GPU {device_index} was asked for; torch sees {count}, counted from 0")


def check_backward() -> None:
    """In a child: whether a backward runs here, which only one that is tried can tell."""
    import torch

    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        raise ForkUnusable("a backward was run before this process was forked") from None


def _no_gpu(what: str, reason: str) -> BadInput:
    return BadInput(
        f"{what} needs a CUDA GPU; {reason}", hint=f"without {what} the estimate needs no GPU at all"
    )
