"""The phases of a step, in the order in which they are shown: for who names them and measures none."""

from __future__ import annotations

from typing import Literal

Phase = Literal["wait", "transfer", "forward", "backward", "optimizer", "rest"]
PHASES: tuple[Phase, ...] = ("wait", "transfer", "forward", "backward", "optimizer", "rest")
