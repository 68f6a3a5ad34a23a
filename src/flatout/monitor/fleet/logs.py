"""Where the samples of a node come from: its log in a folder that all see, or the page that it serves.

A page answers `samples?after=TIME` with a line about the node and the samples after that time.  A client that
asks again, after a break or a restart, gets what it missed, because the node keeps it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from typing import Any, Protocol

from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import BadInput
from flatout.ground.runs import Run
from flatout.monitor.past.history import line_of, parse_lines
from flatout.monitor.sample import Sample

FORMAT = "flatout-node"
PATH = "samples"
TIMEOUT_S = 3.0
MOST_BYTES = 32 * 2**20
BROKEN = (OSError, ValueError, WrongShape, urllib.error.URLError)


class Log(Protocol):
    """The samples of a run: `recent` or `past` once, then `more` again and again."""

    def recent(self) -> list[Sample]: ...

    def past(self) -> list[Sample]: ...

    def more(self) -> list[Sample]: ...

    def again(self) -> Log:
        """Return another reader of the same log."""


def node_lines(host: str, run: Run | None, samples: Iterable[Sample]) -> bytes:
    """Write what a page answers."""
    about = {"format": FORMAT, "version": 1, "host": host, "run": None if run is None else _about(run)}
    return json.dumps(about).encode() + b"\n" + b"".join(map(line_of, samples))


def _about(run: Run) -> dict[str, Any]:
    """Return what others need to know of a run: not its command, which may say more than its log does."""
    known = encode(run)
    return {**known, "command": [], "visible_devices": None, "end": None}


class PageLog:
    """The run that the page of another machine shows first; `problem` says why it gave no answer."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"{url!r} is not the address of a page", hint="http://HOST:PORT/TOKEN/")
        self.host: str = parts.netloc.rpartition("@")[2]  # until the page has told its name
        self.run: Run | None = None
        self.problem: str | None = None
        self.has_answered = False
        self._address = urllib.parse.urlunsplit(parts._replace(query="", fragment=""))
        self._last_s: float | None = None

    def again(self) -> PageLog:
        return PageLog(self._address)

    def past(self) -> list[Sample]:
        self._last_s = None
        return self.more()

    recent = past

    def more(self) -> list[Sample]:
        """Ask for what came since; nothing if the page does not answer."""
        after = "" if self._last_s is None else f"?after={round(self._last_s * 1000)}"
        try:
            with urllib.request.urlopen(
                f"{self._address.rstrip('/')}/{PATH}{after}", timeout=TIMEOUT_S
            ) as answer:
                head, _, lines = answer.read(MOST_BYTES).partition(b"\n")
            about = json.loads(head)
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise ValueError(about)
            self.host = str(about.get("host") or self.host)
            self.run = None if about.get("run") is None else decode(Run, about["run"])
        except BROKEN as error:
            self.problem = _why(error)
            return []
        self.problem, self.has_answered = None, True
        last_s = self._last_s
        samples = [sample for sample in parse_lines(lines) if last_s is None or sample.time_s > last_s]
        self._last_s = samples[-1].time_s if samples else last_s
        return samples


def _why(error: Exception) -> str:
    """Say why a page gave no answer, without its address, which may hold a token."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        refused = error.code in (401, 403)
        return "the address lacks the page's token" if refused else f"HTTP error {error.code}"
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer"
    if isinstance(reason, OSError):
        return (reason.strerror or str(reason)).lower()
    return "not a page of Flatout"
