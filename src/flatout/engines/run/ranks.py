"""This process among those that run one job together.

`torchrun` and `accelerate launch` start one process per GPU (or several on a CPU) and tell each its rank by
environment variables.  Every rank holds the same weights; what travels between them is small: rewards, flags,
mean gradients.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from flatout.ground.errors import BadInput, ChildDied
from flatout.ground.torchrun import Launch, read_launch

if TYPE_CHECKING:
    from torch import Tensor, nn

# A rank waits for the slowest one: an epoch of long completions may take minutes, a lost rank shows sooner.
PATIENCE = datetime.timedelta(minutes=30)


class Ranks:
    """Which of how many processes this is, and its device; alone, every method is free."""

    def __init__(self, *, device: torch.device, rank: int = 0, num_ranks: int = 1) -> None:
        self.device, self.rank, self.num_ranks = device, rank, num_ranks

    @classmethod
    def join(cls, device: str = "auto") -> Ranks:
        """Join the ranks that the launcher's environment names; without one, this process is alone."""
        launch = read_launch()
        own = choose_device(device, local_rank=launch.local_rank)
        if launch.num_ranks > 1:
            _join_group(own, launch)
        return cls(device=own, rank=launch.rank, num_ranks=launch.num_ranks)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    def own(self, numbers: range) -> range:
        """This rank's share of some numbers, dealt in turn."""
        return numbers[self.rank :: self.num_ranks]

    def gather(self, values: Tensor) -> Tensor:
        """The sum of all ranks' values: each fills in its own and leaves zeros elsewhere.

        A sum of one value and zeros has no rounding, so the number of ranks cannot change a bit.
        """
        if self.num_ranks == 1:
            return values
        travelling = values.to(self.device)
        with _lost_ranks():
            distributed.all_reduce(travelling)
        return travelling.to(values.device)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the mean over the ranks."""
        if self.num_ranks == 1:
            return
        # One message for all: on a slow line the number of messages costs more than their size.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _lost_ranks():
            distributed.all_reduce(flat)
        flat /= self.num_ranks
        for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.gather(torch.tensor(float(flag))) > 0)

    def share_weights(self, module: nn.Module) -> None:
        """Give every rank the first one's weights of a module."""
        if self.num_ranks > 1:
            with torch.no_grad(), _lost_ranks():
                for tensor in module.state_dict().values():
                    distributed.broadcast(tensor, src=0)

    def share_text(self, text: str) -> str:
        """The first rank's text, on every rank."""
        shared = [text]
        if self.num_ranks > 1:
            with _lost_ranks():
                distributed.broadcast_object_list(shared, src=0, device=self.device)
        return shared[0]

    def agree(self, what: str, value: int) -> None:
        """BadInput unless every rank has the same value."""
        values = torch.zeros(self.num_ranks, dtype=torch.float64)
        values[self.rank] = value
        found = sorted({int(each) for each in self.gather(values)})
        if len(found) > 1:
            raise BadInput(
                f"ranks differ in {what}: {', '.join(map(str, found))}",
                hint="give all machines the same --out folder",
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may hang in a collective; destroying the group would wait for them.
        if self.num_ranks > 1 and error is None:
            distributed.barrier()
            distributed.destroy_process_group()


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ChildDied(
            f"another rank is gone: {str(error).splitlines()[0]}",
            hint="torchrun --max-restarts N starts all ranks again from the last checkpoint",
        ) from error


def _join_group(device: torch.device, launch: Launch) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Without `device_id` NCCL guesses a GPU from the rank, which is wrong past one machine.
    bound = device if device.type == "cuda" else None
    store = None
    if launch.num_local_ranks == launch.num_ranks:
        # On one machine torchrun keeps its store over restarts, and a rank that is started again may find the
        # address of a dead one there and wait for it: each attempt gets names of its own.
        kept, _, _ = next(rendezvous("env://"))
        store = PrefixStore(f"flatout/{launch.restarts}", kept)
    distributed.init_process_group(
        backend,
        timeout=PATIENCE,
        device_id=bound,
        store=store,
        rank=-1 if store is None else launch.rank,
        world_size=-1 if store is None else launch.num_ranks,
    )


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise BadInput(f"no device {name!r}", hint="take auto, cpu or cuda")
    if name == "cpu" or name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("torch sees no GPU here", hint="omit --device, or take cpu")
    if local_rank >= torch.cuda.device_count():
        raise BadInput(
            f"rank {local_rank} of this machine finds {torch.cuda.device_count()} GPUs",
            hint="start as many processes as there are GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
