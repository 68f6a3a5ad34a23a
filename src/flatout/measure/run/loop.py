"""Diagnose a loop given as a function: `step(batch)` over a loader, in this process."""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import NothingMeasured
from flatout.measure.evidence import Evidence, Place
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.observer import JobListener, Observer, ObserverOptions
from flatout.measure.run.steps import step as mark_step
from flatout.measure.user_code import UserCode

MOST_EPOCHS = 10_000


def observe_loop(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    seconds: float,
    on_progress: OnProgress = ignore,
) -> Evidence:
    """Call `step` on batches of `loader`, epoch after epoch, until the measurement is complete.

    An exception in `step` reaches the caller unchanged, with every instrument removed.
    """
    from torch.utils.data import DataLoader

    options = ObserverOptions(folder=os.getcwd(), seconds=seconds, any_thread=False)
    observer = Observer(options, _Told(on_progress))
    name = getattr(step, "__qualname__", type(step).__name__)
    assembly = Assembly(command=(name,), folder=options.folder)
    observer.install()
    observer.loaders.note_made(loader, _made_at(loader, sys._getframe(1), observer.user_code))
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
                break  # an exhausted generator, or a loader without batches
    finally:
        observer.remove()
    if not observer.rows:
        raise NothingMeasured(
            "the loader gave fewer than two batches", hint="a diagnosis needs some 60 steps"
        )
    return assembly.evidence(observer, Ending("finished", 0))


class _Told(JobListener):
    """Passes progress on to the caller."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress

    def progress(self, message: str) -> None:
        self._on_progress(message)


def _made_at(loader: Any, frame: FrameType | None, user_code: UserCode) -> Place | None:
    """Return the line that made `loader`, found by the caller's name for it, or the line of the call."""
    while frame is not None and not user_code.is_user(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return None
    names = {
        name
        for scope in (frame.f_globals, frame.f_locals)
        for name, value in scope.items()
        if value is loader
    }
    made = [
        node.lineno
        for node in ast.walk(_parsed(frame.f_code.co_filename))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]
    before = [line for line in made if line <= frame.f_lineno]
    return user_code.place_in(frame.f_code, line=max(before or made, default=frame.f_lineno))


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
