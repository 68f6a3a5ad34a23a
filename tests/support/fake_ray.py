"""A stand-in for Ray: its tasks run in this process when waited for, the first that was started first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class FakeTask:
    """A task that has not run yet, has ended, or was cancelled."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.function, self.arguments, self.options = function, arguments, options
        self.has_run = self.is_cancelled = False
        self.result: Any = None

    def run(self) -> None:
        if not self.has_run:
            self.has_run = True
            try:
                self.result = self.function(*self.arguments)
            except Exception as error:  # noqa: BLE001
                self.result = FakeRayError(f"{type(error).__name__}: {error}")


class FakeRayError(Exception):
    """What Ray raises for a task that failed."""


class FakeRay(ModuleType):
    """As much of Ray as a RayCluster asks for; `rooms` are the CPUs and GPUs of its nodes."""

    exceptions = SimpleNamespace(RayError=FakeRayError)

    def __init__(self, rooms: list[tuple[float, float]]) -> None:
        super().__init__("ray")
        self.rooms, self.is_connected = rooms, False
        self.started: list[FakeTask] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        monkeypatch.setitem(sys.modules, "ray", self)
        return self

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, *, address: str, **options: Any) -> None:
        if address == "nowhere:1":
            raise ConnectionError("nobody listens there")
        self.is_connected = True

    def shutdown(self) -> None:
        self.is_connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Alive": True,
                "NodeID": f"node-{number}",
                "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})},
            }
            for number, (cpus, gpus) in enumerate(self.rooms)
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: f"node-{sum(task.has_run for task in self.started) % 2}")

    def remote(self, function: Callable[..., Any]) -> Any:
        def start(*arguments: Any, options: dict[str, Any]) -> FakeTask:
            self.started.append(FakeTask(function, arguments, options))
            return self.started[-1]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(
                remote=lambda *arguments: start(*arguments, options=options)
            )
        )

    def wait(
        self, tasks: list[FakeTask], *, num_returns: int, timeout: float | None
    ) -> tuple[list[FakeTask], list[FakeTask]]:
        ended = [task for task in tasks if task.has_run]
        if not ended and timeout != 0:
            ended = [task for task in self.started if task in tasks][:1]
            ended[0].run()
        return ended[:num_returns], [task for task in tasks if task not in ended[:num_returns]]

    def get(self, task: FakeTask) -> Any:
        task.run()
        if isinstance(task.result, FakeRayError):
            raise task.result
        return task.result

    def cancel(self, task: FakeTask, *, force: bool) -> None:
        task.is_cancelled, task.has_run = True, True
