"""This process among those that train together.

`torchrun` and `accelerate launch` start one process per GPU (or several on a CPU); Accelerate joins them.
All hold the same weights.  Each takes its share of the batches of an optimizer step, and what travels is the
mean of their gradients: the step is the one that a single process would make of all those batches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from flatout.errors import BadInput, import_extra


class Processes:
    """Which of how many processes this is, and its device; alone, every method is free."""

    def __init__(self, *, device: torch.device, rank: int = 0, num: int = 1) -> None:
        self.device, self.rank, self.num = device, rank, num

    @classmethod
    def join(cls, device: str = "auto") -> Processes:
        """What the launcher's environment says, joined; one process alone without it."""
        if device == "cuda" and not torch.cuda.is_available():
            raise BadInput("torch sees no GPU here", hint="leave --device away, or take cpu")
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=torch.device("cpu") if on_cpu else torch.device("cuda", 0))
        state = import_extra("accelerate", extra="adapters").PartialState(cpu=on_cpu)
        own = torch.device("cpu") if on_cpu else state.device  # there is no first and second CPU
        return cls(device=own, rank=state.process_index, num=state.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and speaks."""
        return self.rank == 0

    def own(self, numbers: range) -> range:
        """This process's share of the batches of one step."""
        return numbers[self.rank :: self.num]

    def check_share(self, accumulate: int, *, phase: str) -> None:
        """BadInput unless the batches of a step can be shared out evenly."""
        if accumulate % self.num:
            raise BadInput(
                f"{phase}.accumulate={accumulate} batches cannot be shared among {self.num} processes",
                hint=f"--set {phase}.accumulate={-(-accumulate // self.num) * self.num}",
            )

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the mean over the processes."""
        if self.num == 1:
            return
        operations = import_extra("accelerate.utils", extra="adapters")
        # One message for all: on a slow line the number of messages costs more than their size.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        flat = operations.reduce(flat, reduction="mean")
        for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        if self.num == 1:
            return flag
        operations = import_extra("accelerate.utils", extra="adapters")
        said = operations.reduce(torch.tensor(float(flag), device=self.device), reduction="max")
        return bool(said > 0)

    def align(self, module: nn.Module) -> None:
        """Give every process the first one's weights of a module."""
        if self.num > 1:
            operations = import_extra("accelerate.utils", extra="adapters")
            with torch.no_grad():
                for tensor in module.state_dict().values():
                    tensor.copy_(operations.broadcast(tensor))

    def agree(self, what: str, value: int) -> None:
        """BadInput unless every process has the same value."""
        if self.num == 1:
            return
        operations = import_extra("accelerate.utils", extra="adapters")
        both = torch.tensor([float(value), -float(value)], device=self.device)
        most, least = operations.reduce(both, reduction="max").tolist()
        if most != -least:
            raise BadInput(
                f"the processes differ in {what}: from {-least:.0f} to {most:.0f}",
                hint="all machines need one and the same --out folder",
            )

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may hang in a collective; destroying the group would wait for them.
        if self.num > 1 and error is None:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
