"""Serve the patched text in place of the user's file during a trial, in memory, for every importer.

The file on disk stays unchanged, and so does its cached bytecode, which is neither read nor written for a
served file.  Tracebacks and `inspect` see the patched lines.
"""

from __future__ import annotations

import importlib.machinery
import linecache
import os
from collections.abc import Mapping
from typing import Any

from flatout.measure.patches import Patches


def serve(texts: Mapping[str, str], patches: Patches) -> None:
    """Let Python's import system find these texts under these paths."""
    found = {os.path.realpath(path): text for path, text in texts.items()}
    if not found:
        return
    loader = importlib.machinery.SourceFileLoader
    real_data, real_stats = loader.get_data, loader.path_stats

    def get_data(self: Any, path: Any) -> bytes:
        text = found.get(os.path.realpath(path))
        if text is None:
            return real_data(self, path)
        lines = text.splitlines(keepends=True)
        linecache.cache[os.fspath(path)] = (len(text), None, lines, os.fspath(path))
        return text.encode("utf-8")

    def path_stats(self: Any, path: Any) -> Mapping[str, Any]:
        if os.path.realpath(path) in found:
            raise OSError("a text without a time has no bytecode")
        return real_stats(self, path)

    patches.replace(loader, "get_data", get_data)
    patches.replace(loader, "path_stats", path_stats)
