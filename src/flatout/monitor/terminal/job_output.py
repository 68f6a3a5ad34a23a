"""What a job writes to the terminal that it shares with the live line.

A print that comes while the live line stands would be appended to it.  So the line is wiped just before the
job's text arrives, and it is not drawn over a line that the job has begun and not ended.  The job's streams
stay the objects they are: only their `write` is stood in for, and given back at the end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TextIO

Write = Callable[[str], int]


class JobOutput:
    """Hears what is written to some streams; `wipe` is called, under `lock`, before the text goes out."""

    def __init__(self, wipe: Callable[[], None]) -> None:
        self.lock = threading.RLock()  # a signal's handler may print in the middle of a print
        self.is_mid_line = False
        self._wipe = wipe
        self._pid = os.getpid()
        self._heard: list[tuple[TextIO, Write, Write]] = []  # with its own write, and what stands in for it

    def hear(self, stream: TextIO | None) -> None:
        """Once for each terminal; one that takes no attribute is written to as if nobody heard it."""
        attributes = getattr(stream, "__dict__", None)
        if stream is None or attributes is None or not getattr(stream, "isatty", bool)():
            return
        if any(stream is known for known, _, _ in self._heard):
            return
        own = stream.write

        def write(text: str) -> int:
            if os.getpid() != self._pid:  # forked: whoever held the lock is not in this process
                return own(text)
            with self.lock:
                if text:
                    self._wipe()
                    self.is_mid_line = not text.endswith("\n") and "\r" not in text
                return own(text)

        attributes["write"] = write
        self._heard.append((stream, own, write))

    def write_unheard(self, stream: TextIO, text: str) -> None:
        """As the live line does."""
        own = next((own for known, own, _ in self._heard if known is stream), stream.write)
        own(text)
        stream.flush()

    def close(self) -> None:
        for stream, _, write in self._heard:
            if stream.__dict__.get("write") is write:  # who stood in for it later keeps what he has
                del stream.__dict__["write"]
        self._heard.clear()
