"""Runs a function in a child process that may use CUDA, or run a backward.

With a CUDA build of torch, a process that has asked CUDA for anything, even for the number of GPUs, cannot
fork a child that uses CUDA; and after its first backward none whose own backward would run.  The child is
forked where it can be, since a forked one is given models as they are; otherwise the work is packed
(`parcel`) and sent to a server that starts from nothing and forks there (`fork_server`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flatout.errors import BadInput, ForkUnusable
from flatout.memory.process.child import answered, run_in_child
from flatout.memory.process.fork_server import answer_from_server

Result = TypeVar("Result")


def in_fresh_process(
    function: Callable[..., Result], *args: Any, what: str, with_values: bool = False
) -> Result:
    """In a child that may use CUDA, which `what` needs; `with_values` where it computes with the weights."""
    check_build(what)
    return forked_or_sent(function, *args, what=what, with_values=with_values)


def forked_or_sent(
    function: Callable[..., Result], *args: Any, what: str, with_values: bool = False
) -> Result:
    """In a forked child; in one of the server where CUDA was used here, or where the forked one is of no use.

    A trace by the rules asks CUDA nothing, but a model or a batch that lies on a GPU does when it is read.
    """
    import torch

    if not torch.cuda.is_initialized():
        try:
            return run_in_child(function, *args)
        except ForkUnusable:
            pass
    return sent(function, *args, what=what, with_values=with_values)


def sent(function: Callable[..., Result], *args: Any, what: str, with_values: bool = False) -> Result:
    """In a child of the server, which gets a copy of everything (see `parcel`)."""
    from flatout.memory.process.parcel import packed

    try:
        parcel = packed(function, args, with_values=with_values)
    except BadInput as error:
        raise BadInput(
            f"this process has used a GPU or run a backward, and {error.message}",
            hint=f"ask for {what} before that, or leave out of the job what cannot be copied",
        ) from error
    result: Result = answered(answer_from_server(parcel))
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
