"""The sinks that a user chose, and how to open them.

The choice is plain data: it travels to the process of a job that is started with its sinks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flatout.ground import OnProgress, ignore
from flatout.ground.errors import BadInput
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
def open_sinks(choice: SinkChoice, *, on_progress: OnProgress = ignore) -> Iterator[tuple[Sink, ...]]:
    """Open the sinks and close them at the end; raise BadInput if one cannot be opened."""
    sinks: list[Sink] = []
    with ExitStack() as stack:
        try:
            for sink in _make_sinks(choice, on_progress):
                stack.callback(_close, sink, os.getpid())
                sinks.append(sink)
        except OSError as error:
            raise BadInput(
                f"{error.filename or 'a sink'} cannot be written: {error.strerror}",
                hint="choose another file or folder for it",
            ) from None
        yield tuple(sinks)


def _make_sinks(choice: SinkChoice, on_progress: OnProgress) -> Iterator[Sink]:
    """Make the chosen sinks; import modules only for those."""
    if choice.jsonl is not None or choice.csv is not None or choice.tensorboard is not None:
        from flatout.monitor.sinks.files import Csv, JsonLines, TensorBoard

        if choice.jsonl is not None:
            yield JsonLines(_in_folder(choice.jsonl))
        if choice.csv is not None:
            yield Csv(_in_folder(choice.csv))
        if choice.tensorboard is not None:
            yield TensorBoard(Path(choice.tensorboard))
    if choice.prometheus is not None:
        from flatout.monitor.sinks.prometheus import MetricsEndpoint

        endpoint = MetricsEndpoint(choice.prometheus)
        on_progress(f"metrics are at {endpoint.url}")
        yield endpoint


def _in_folder(name: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _close(sink: Sink, owner: int) -> None:
    if os.getpid() != owner:  # a forked child, which would wait for threads that only its parent has
        return
    with contextlib.suppress(OSError):  # a full disk, which was noted when the sample was written
        sink.close()
