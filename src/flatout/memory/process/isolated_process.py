"""Run a function in a child process and return its result.

Traces change the process they run in (see `cuda.rules`), and a model's code may crash or take all memory:
neither may reach the caller.  The child is forked where possible, since a forked child has the caller's
models as they are.  With a CUDA build of torch that is not always possible: once a process has asked CUDA for
anything, even for the number of GPUs, its children cannot use CUDA, and once it has run a backward, its
children cannot run one.  Then the work is packed (`parcel`) and sent to a server that starts from nothing and
forks there (`fork_server`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flatout.ground.errors import BadInput, ChildDied, FlatoutError, ForkUnusable, first_line

Result = TypeVar("Result")
FORK_TRIES = 300


def run_with_cuda(
    function: Callable[..., Result], *args: Any, what: str, with_values: bool = False
) -> Result:
    """Run a function in a child that may use CUDA, which `what` needs; `with_values` sends the weights."""
    check_build(what)
    return run_isolated(function, *args, what=what, with_values=with_values)


def run_isolated(function: Callable[..., Result], *args: Any, what: str, with_values: bool = False) -> Result:
    """Run a function in a forked child; in one of the server if CUDA was used here, or if the fork fails.

    A trace by the rules asks CUDA nothing, but a model or a batch that lies on a GPU does when it is read.
    """
    import torch

    if not torch.cuda.is_initialized():
        try:
            return run_in_child(function, *args)
        except ForkUnusable:
            pass
    return run_on_server(function, *args, what=what, with_values=with_values)


def run_on_server(
    function: Callable[..., Result], *args: Any, what: str, with_values: bool = False
) -> Result:
    """Run a function in a child of the server, which gets a copy of everything (see `parcel`)."""
    from flatout.memory.process.fork_server import answer_from_server
    from flatout.memory.process.parcel import pack

    try:
        parcel = pack(function, args, with_values=with_values)
    except BadInput as error:
        raise BadInput(
            f"this process has used a GPU or run a backward, and {error.message}",
            hint=f"ask for {what} before that, or leave out of the job what cannot be copied",
        ) from error
    result: Result = open_answer(answer_from_server(parcel))
    return result


def check_build(what: str) -> None:
    """Raise BadInput if no child could ever use CUDA; this asks CUDA nothing."""
    import torch

    if torch.version.cuda is None:
        raise _no_gpu(what, "this build of torch has no CUDA")


def check_cuda(device_index: int, *, what: str) -> None:
    """Check, in a child, that it can use this GPU."""
    import torch

    if torch.cuda._is_in_bad_fork():
        raise ForkUnusable("CUDA was used before this process was forked")
    if not torch.cuda.is_available():
        raise _no_gpu(what, "torch sees none here")
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise BadInput(f"GPU {device_index} was asked for; torch sees {count}, counted from 0")


def check_backward() -> None:
    """Check, in a child, that a backward runs: only trying one can tell."""
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


def run_in_child(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run `function(*args, **kwargs)` in a forked child; its FlatoutErrors are raised here as they are."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function, args, kwargs), daemon=True)
    with warnings.catch_warnings():  # of threads that a fork leaves behind: the child uses none of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        _start(process)
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        process.join()
        raise ChildDied(
            f"the process that traced the model exited with code {process.exitcode} without an answer",
            hint="a negative code is a signal; -9 is most often the system running out of memory",
        ) from None
    finally:
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.kill()
    result: Result = open_answer(answer)
    return result


def _start(process: Any) -> None:
    """Fork; try again while a library that changes its file locks in another thread refuses."""
    for _ in range(FORK_TRIES):
        try:
            process.start()
            return
        except RuntimeError as error:
            if "fork is unsafe" not in str(error):
                raise
            time.sleep(0.01)
    process.start()


def open_answer(answer: tuple[str, Any]) -> Any:
    """Return the result that `answer_of` brought back, or raise its error."""
    kind, value = answer
    if kind == "error":
        raise value
    return value


def _answer(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    pipe.send(answer_of(function, args, kwargs))
    pipe.close()


def answer_of(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any]:
    """Return, in a child, ("result", what the function returns) or ("error", what to raise)."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    # It logs the traceback of every error, and the error itself is what comes back.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return ("result", function(*args, **kwargs))
    except FlatoutError as error:
        return ("error", error)
    except Exception as error:  # noqa: BLE001  the model's own code can raise anything
        described = BadInput(
            f"the step raised {type(error).__name__}: {first_line(error)}",
            hint=f"at {_place(error)}; it runs without data here",
        )
        return ("error", described)


def _place(error: Exception) -> str:
    """Find the innermost line outside PyTorch and this room: the one that the reader can change."""
    import torch

    room = os.path.dirname(os.path.dirname(__file__))
    others = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), room))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    where = own[-1] if own else frames[-1]
    return f"{where.filename}:{where.lineno}"
