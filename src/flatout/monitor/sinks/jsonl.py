"""Samples as JSON lines, one whole document each, for whoever wants to read them with other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from flatout.monitor.sample import Sample


class JsonLines:
    """Appends to a file or a stream; a reader of it sees every line as soon as it is whole."""

    def __init__(self, target: Path | TextIO) -> None:
        self._owned = target.open("a", encoding="utf-8") if isinstance(target, Path) else None
        self._stream: TextIO = self._owned or target  # type: ignore[assignment]

    def __call__(self, sample: Sample) -> None:
        self._stream.write(json.dumps(sample.to_json(), separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()
