"""Runs a function in a child process and brings its result back.

Traces change the process they run in (see `cuda_rules`), and a model's code may crash or take all memory:
neither may reach the caller.  The child is forked, so that models given as objects need not be copied.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flatout.errors import BadInput, ChildDied, FlatoutError

Result = TypeVar("Result")


def run_in_child(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """`function(*args, **kwargs)` in a forked child; its FlatoutErrors are raised here as they are."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function, args, kwargs), daemon=True)
    with warnings.catch_warnings():  # of threads that a fork leaves behind: the child uses none of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        process.join()
        raise ChildDied(
            f"the process that traced the model ended with code {process.exitcode} and said nothing",
            hint="a negative code is a signal; -9 is most often the system running out of memory",
        ) from None
    finally:
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.kill()
    result: Result = answered(answer)
    return result


def answered(answer: tuple[str, Any]) -> Any:
    """What `answer_of` brought back: the result, or its error raised."""
    kind, value = answer
    if kind == "error":
        raise value
    return value


def _answer(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    pipe.send(answer_of(function, args, kwargs))
    pipe.close()


def answer_of(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, Any]:
    """In a child: ("result", what the function returns) or ("error", what is to be raised)."""
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
        return ("error", _raised(error, _place(error)))


def _place(error: Exception) -> str:
    """The innermost line of neither PyTorch nor the trace: the one its reader can change."""
    import torch

    room = os.path.dirname(os.path.dirname(__file__))
    others = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), room))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    where = own[-1] if own else frames[-1]
    return f"{where.filename}:{where.lineno}"


def _raised(error: Exception, where: str) -> FlatoutError:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return BadInput(
        f"the step raised {type(error).__name__}: {first_line}",
        hint=f"at {where}; it runs without data here",
    )
