"""Diagnosis of a loop given as a function: `step(batch)` over a loader, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from flatout.ground.errors import NothingMeasured
from flatout.measure.evidence import Evidence
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import Observer, ObserverOptions
from flatout.measure.run.steps import step as mark_step

MOST_EPOCHS = 10_000


def observe_loop(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    seconds: float,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Evidence:
    """Call `step` on batches of `loader`, epoch after epoch, until the measurement is complete.

    An exception of `step` is the caller's own and reaches it unchanged, with every instrument removed.
    """
    from torch.utils.data import DataLoader

    options = ObserverOptions(folder=os.getcwd(), seconds=seconds)
    observer = Observer(options, on_finished=lambda: None, on_progress=on_progress)
    name = getattr(step, "__qualname__", type(step).__name__)
    assembly = Assembly(command=(name,), folder=options.folder)
    observer.install()
    try:
        for _epoch in range(MOST_EPOCHS):
            num_before = observer.loaders.num_batches
            batches = loader if isinstance(loader, DataLoader) else observer.loaders.watch_iterable(loader)
            for batch in batches:
                step(batch)
                mark_step()
                if observer.finished:
                    return assembly.evidence(observer, Ending("measured", 0))
            if observer.loaders.num_batches == num_before:
                break  # a generator that is used up, or a loader without batches
    finally:
        observer.remove()
    if not observer.rows:
        raise NothingMeasured(
            "the loader gave fewer than two batches", hint="a diagnosis needs some 60 steps"
        )
    return assembly.evidence(observer, Ending("finished", 0))
