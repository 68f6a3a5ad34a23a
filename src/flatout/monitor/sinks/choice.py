"""Which sinks a user chose, and those sinks while they are open.

The choice is plain data: it travels to the process of a job that is started with its sinks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flatout.errors import BadInput
from flatout.monitor.sample import Sample


class Sink(Protocol):
    """Takes every sample, until it is closed."""

    def __call__(self, sample: Sample) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkChoice:
    """Files, folders and ports; None: not wanted."""

    jsonl: str | None = None
    csv: str | None = None
    tensorboard: str | None = None
    prometheus: int | None = None


@contextmanager
def opened(
    choice: SinkChoice, *, on_note: Callable[[str], None] = lambda note: None
) -> Iterator[tuple[Sink, ...]]:
    """The sinks, closed at the end; BadInput where one cannot be opened."""
    with ExitStack() as stack:
        sinks = []
        for make in _makers(choice, on_note):
            try:
                sink = make()
            except OSError as error:
                raise BadInput(
                    f"{error.filename or 'a sink'} cannot be written: {error.strerror}",
                    hint="choose another file or folder for it",
                ) from None
            stack.callback(_close, sink, os.getpid())
            sinks.append(sink)
        yield tuple(sinks)


def _makers(choice: SinkChoice, on_note: Callable[[str], None]) -> Iterator[Callable[[], Sink]]:
    """Modules are imported for the sinks that are wanted only."""
    if choice.jsonl is not None:
        from flatout.monitor.sinks.jsonl import JsonLines

        path = Path(choice.jsonl)
        yield lambda: JsonLines(_with_folder(path))
    if choice.csv is not None:
        from flatout.monitor.sinks.csv import Csv

        table = Path(choice.csv)
        yield lambda: Csv(_with_folder(table))
    if choice.tensorboard is not None:
        from flatout.monitor.sinks.tensorboard import TensorBoard

        folder = Path(choice.tensorboard)
        yield lambda: TensorBoard(folder)
    if choice.prometheus is not None:
        from flatout.monitor.sinks.endpoint import MetricsEndpoint

        endpoint = MetricsEndpoint(choice.prometheus)
        on_note(f"metrics are at {endpoint.url}")
        yield lambda: endpoint


def _close(sink: Sink, owner: int) -> None:
    if os.getpid() != owner:  # a forked child, which would wait for threads that only its parent has
        return
    with contextlib.suppress(OSError):  # a full disk, which was noted when the sample was written
        sink.close()


def _with_folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
