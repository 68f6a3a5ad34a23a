"""An automatic choice that says why it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Value = TypeVar("Value")
Source = Literal["measured", "computed", "datasheet", "assumed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Generic[Value]):
    """A chosen value, the reason in one sentence, and what the reason rests on."""

    value: Value
    reason: str
    source: Source

    def __str__(self) -> str:
        return f"{self.value} ({self.source}: {self.reason})"
