"""Exit codes by which the observed process tells the launching one what to do next."""

from __future__ import annotations

HALF_FAILED = 75  # the script raised on half a batch: run it again without
NOT_WRITTEN = 74  # the evidence could not be written
