"""Several processes, one population: who runs which members, and the only thing that travels.

`torchrun` starts one process per GPU (or several on a CPU) and tells each its rank by environment variables.
Weights never travel: every rank holds the same ones, draws the same noise and, given the fitness of all
members, computes the same update.  What is sent is one number per member and prompt.
"""

from __future__ import annotations

import datetime
import os
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from flatout.errors import BadInput, ChildDied

if TYPE_CHECKING:
    from torch import Tensor

# A rank waits for the slowest one: an epoch of long completions may take minutes, a lost rank shows sooner.
PATIENCE = datetime.timedelta(minutes=30)


class Ranks:
    """This process among its peers; alone, every method is free."""

    def __init__(self, *, device: torch.device, rank: int = 0, num_ranks: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.num_ranks = num_ranks

    @classmethod
    def join(cls, device: str = "auto") -> Ranks:
        """What torchrun's environment says, joined; one process alone without it."""
        rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        own = own_device(device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
        if num_ranks > 1:
            _join_group(own, rank=rank, num_ranks=num_ranks)
        return cls(device=own, rank=rank, num_ranks=num_ranks)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values: each fills in its own members and leaves zeros elsewhere.

        A sum of one value and zeros has no rounding, so the number of ranks cannot change a bit.
        """
        if self.num_ranks == 1:
            return values
        travelling = values.to(self.device)
        try:
            torch.distributed.all_reduce(travelling)
        except RuntimeError as error:
            raise ChildDied(
                f"another rank is gone: {str(error).splitlines()[0]}",
                hint="torchrun --max-restarts N starts all ranks again from the last checkpoint",
            ) from error
        return travelling.to(values.device)

    def agree(self, what: str, value: int) -> None:
        """BadInput unless every rank has the same value."""
        values = torch.zeros(self.num_ranks, dtype=torch.float64)
        values[self.rank] = value
        found = sorted({int(each) for each in self.gather(values)})
        if len(found) > 1:
            raise BadInput(
                f"ranks differ in {what}: {', '.join(map(str, found))}",
                hint="all machines need one and the same --out folder",
            )

    def barrier(self) -> None:
        if self.num_ranks > 1:
            torch.distributed.barrier()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the peers may hang in a collective; destroying the group would wait for them.
        if self.num_ranks > 1 and error is None:
            torch.distributed.destroy_process_group()


def _join_group(device: torch.device, *, rank: int, num_ranks: int) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Without `device_id` NCCL guesses a GPU from the rank, which is wrong past one machine.
    bound = device if device.type == "cuda" else None
    store = None
    if os.environ.get("LOCAL_WORLD_SIZE") == str(num_ranks):
        # On one machine torchrun keeps its store over restarts, and a rank that is started again may find the
        # address of a dead one there and wait for it: each attempt gets names of its own.
        kept, _, _ = next(rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"flatout/{attempt}", kept)
    torch.distributed.init_process_group(
        backend,
        timeout=PATIENCE,
        device_id=bound,
        store=store,
        rank=-1 if store is None else rank,
        world_size=-1 if store is None else num_ranks,
    )


def own_device(name: str, *, local_rank: int) -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise BadInput(f"no device {name!r}", hint="auto, cpu or cuda")
    if name == "cpu" or name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("torch sees no GPU here", hint="leave --device away, or take cpu")
    if local_rank >= torch.cuda.device_count():
        raise BadInput(
            f"rank {local_rank} of this machine finds {torch.cuda.device_count()} GPUs",
            hint="start as many processes as there are GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
