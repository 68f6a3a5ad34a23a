"""Run compiled models and functions eagerly during a trace, and note whether there were any.

`torch.compile` would compile for the CPU that the trace runs on, and around the trace's own code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import eval_frame


@contextmanager
def run_eagerly() -> Iterator[Callable[[], bool]]:
    """Compile nothing within the block; yield a function that says whether something would have been."""
    entered: list[Any] = []
    choose: Any = eval_frame._callback_from_stance

    def note(callback: Any) -> Any:
        if callback:
            entered.append(callback)
        return choose(callback)

    places: Any = eval_frame
    places._callback_from_stance = note
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
            yield lambda: bool(entered)
    finally:
        places._callback_from_stance = choose
