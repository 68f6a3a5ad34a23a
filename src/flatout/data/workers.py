"""How many loader workers a dataset needs, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flatout.decisions import Decision


def choose_workers(
    dataset: Any,
    batch_size: int | None = None,
    *,
    step_s: float | None = None,
    candidates: Sequence[int] | None = None,
    seconds: float = 20.0,
    loader: Callable[..., Any] | None = None,
    **loader_options: Any,
) -> Decision[int]:
    """The number of workers that feeds a training step fastest, by interleaved trials.

    `step_s` is the time of a step without its loader; with it, the choice is the fewest workers that hide
    the loading behind it.  `loader` is the loader's class (`DataLoader` by default, or torchdata's
    `StatefulDataLoader`); `loader_options` go to it unchanged.
    """
    raise NotImplementedError
