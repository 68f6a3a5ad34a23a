"""`flatout.step()`: the explicit end of a step, for loops that no optimizer marks.

Outside a diagnosis it does nothing, so a training script may keep it.
"""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[], None] | None = None


def step() -> None:
    """Mark the end of one step of the job."""
    if _listener is not None:
        _listener()


def listen(listener: Callable[[], None] | None) -> None:
    global _listener
    _listener = listener
