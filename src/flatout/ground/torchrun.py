"""What a launcher tells each process of a job: torchrun and `accelerate launch` set environment variables.

This is the only place that reads them.  A process that nobody launched is rank 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """This process among those of its job."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int | None = None  # on this machine; None: the launcher does not say
    node: int | None = (
        None  # the number of this machine among those of the job; None: the launcher does not say
    )
    restarts: int = 0  # how often torchrun has started the job again after a crash
    is_launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0


def read_launch(variables: Mapping[str, str] = os.environ) -> Launch:
    """Read who this process is; a variable that is missing or not a number counts as not set."""

    def number(name: str) -> int | None:
        text = variables.get(name, "")
        return int(text) if text.isdigit() else None

    return Launch(
        rank=number("RANK") or 0,
        num_ranks=number("WORLD_SIZE") or 1,
        local_rank=number("LOCAL_RANK") or 0,
        num_local_ranks=number("LOCAL_WORLD_SIZE") or None,
        node=number("GROUP_RANK"),
        restarts=number("TORCHELASTIC_RESTART_COUNT") or 0,
        is_launched=number("RANK") is not None,
    )
