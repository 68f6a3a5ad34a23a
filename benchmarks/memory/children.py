"""Work in forked children, one process for each piece: its own CUDA context, allocator and crash."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

Task = tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]


def _child(pipe: Any, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        answer = work(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever ends a child is its answer
        text = f"{type(error).__name__}: {error}"[:600]
        answer = {"error": text, "traceback": traceback.format_exc(limit=-8)[-4000:]}
    pipe.send(answer)
    pipe.close()


class Pool:
    """At most `width` children at a time; one that outlives `limit_s` is ended."""

    def __init__(self, *, width: int, limit_s: float) -> None:
        self.width, self.limit_s = width, limit_s
        self.context = multiprocessing.get_context("fork")
        self.alive: dict[Any, tuple[str, Any, float]] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process, _ in self.alive.values():
            process.terminate()

    def one(self, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
        ((_, answer),) = self.run([("", work, arguments)], deadline=time.monotonic() + self.limit_s)
        return answer

    def run(self, tasks: list[Task], *, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Answers as they come; past the deadline nothing is started any more."""
        waiting = list(tasks)
        while self.alive or (waiting and time.monotonic() < deadline):
            while waiting and len(self.alive) < self.width and time.monotonic() < deadline:
                self._start(*waiting.pop(0))
            for pipe in multiprocessing.connection.wait(list(self.alive), timeout=1.0):
                yield self._collect(pipe)
            yield from self._end_overdue()

    def _start(self, label: str, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
        receive, send = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_child, args=(send, work, arguments))
        process.start()
        send.close()
        self.alive[receive] = (label, process, time.monotonic())

    def _collect(self, pipe: Any) -> tuple[str, dict[str, Any]]:
        label, process, _ = self.alive.pop(pipe)
        try:
            answer: dict[str, Any] = pipe.recv()
        except EOFError:
            process.join(5)
            answer = {"error": f"the child died with exit code {process.exitcode}"}
        pipe.close()
        process.join(10)
        if process.is_alive():
            process.terminate()
        return label, answer

    def _end_overdue(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for pipe, (label, process, start) in list(self.alive.items()):
            if time.monotonic() - start > self.limit_s:
                process.kill()
                process.join(10)
                del self.alive[pipe]
                yield label, {"error": f"took over {self.limit_s:.0f} s"}
