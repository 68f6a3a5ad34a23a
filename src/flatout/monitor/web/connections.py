"""Close connections that do nothing, so that a browser always finds a free one.

A connection is idle without a whole request head, and stuck if nobody reads its answer. Both have a time
limit; when connections run short, those idle longest are closed at once.  uvicorn limits only the time after
an answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MOST = 512
PLENTY = MOST // 2  # so many may stay, however many of them are idle
IDLE_S = 10.0
STUCK_S = 60.0
SWEEP_EVERY_S = 0.5


class Sweep:
    """Checks the connections of a uvicorn server at every call."""

    def __init__(self, connections: Collection[Any]) -> None:
        self._connections = connections
        self._since_s: dict[tuple[Any, str], float] = {}  # a connection and what it does -> since when

    def arrived(self, connection: Any, now_s: float) -> None:
        """Note when a connection came; one too many makes room at once, so that it is answered."""
        self._since_s[connection, "idle"] = now_s
        if len(self._connections) > PLENTY:
            self(now_s)

    def __call__(self, now_s: float) -> None:
        found = [(each, does) for each in self._connections if (does := _does(each)) is not None]
        self._since_s = {key: self._since_s.get(key, now_s) for key in found}
        for (connection, does), since_s in self._since_s.items():
            if now_s - since_s > (IDLE_S if does == "idle" else STUCK_S):
                connection.transport.abort()
        num_over = len(self._connections) - PLENTY
        idle = [(since_s, each) for (each, does), since_s in self._since_s.items() if does == "idle"]
        for _, connection in sorted(idle, key=lambda pair: pair[0])[: max(num_over, 0)]:
            connection.transport.abort()


def _does(connection: Any) -> str | None:
    if connection.cycle is None or connection.cycle.response_complete:
        return "idle"
    return "stuck" if connection.transport.get_write_buffer_size() else None
