"""This process among the processes of one job.

`torchrun`, `accelerate launch` and `srun` start one process per GPU (or several on a CPU) and tell each its
rank by environment variables.  Every rank holds the same weights; what travels between them is small:
rewards, flags, gradients of adapters.  `sent_bytes` counts what leaves this process.

Small numbers travel between CPUs (gloo).  Gradients travel between GPUs (NCCL) where every rank has its own;
NCCL refuses two ranks on one GPU, and there gloo carries gradients too.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import distributed

from flatout.engines.run.meeting import PATIENCE, Meeting, lost_ranks
from flatout.ground.errors import BadInput
from flatout.hardware.host import read_host

if TYPE_CHECKING:
    from torch import Tensor, nn


class Ranks:
    """This process's number, the number of processes, and its device; with one, methods cost nothing."""

    def __init__(
        self,
        *,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        meeting: Meeting | None = None,
        carrier: torch.device | None = None,
    ) -> None:
        """Send tensors from `carrier`: a GPU for NCCL, else the CPU."""
        self.device, self.rank, self.num_ranks = device, rank, num_ranks
        self.meeting = meeting
        self._carrier = carrier or torch.device("cpu")
        self._kept: tuple[object, tuple[Tensor, Tensor, Tensor]] | None = None  # of the last exchange
        self.sent_bytes: Counter[str] = Counter()  # by what it was

    @classmethod
    def join(cls, device: str = "auto", *, meeting: Meeting | None = None) -> Ranks:
        """Join the ranks of a meeting, or those that the launcher's environment names."""
        meeting = meeting or Meeting.join()
        launch = meeting.launch
        own = choose_device(device, local_rank=launch.local_rank)
        carrier = torch.device("cpu")
        if launch.num_ranks > 1:
            places = meeting.gather(_name_of(own))
            if own.type == "cuda" and len(set(places)) == len(places):
                carrier = own
            with lost_ranks():
                distributed.init_process_group(
                    "cpu:gloo,cuda:nccl" if carrier.type == "cuda" else "gloo",
                    timeout=PATIENCE,
                    store=meeting.store,
                    rank=launch.rank,
                    world_size=launch.num_ranks,
                )
        return cls(device=own, rank=launch.rank, num_ranks=launch.num_ranks, meeting=meeting, carrier=carrier)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and reports progress."""
        return self.rank == 0

    @property
    def is_deputy(self) -> bool:
        """Whether this process saves the run if the first rank is lost: the first rank of the second node."""
        num_local = None if self.meeting is None else self.meeting.launch.num_local_ranks
        return self.rank == min(num_local or 1, self.num_ranks - 1)

    def own(self, numbers: range) -> range:
        """Return this rank's share of some numbers, dealt in turn."""
        return numbers[self.rank :: self.num_ranks]

    def gather(self, values: Tensor, *, what: str = "flags") -> Tensor:
        """Return the sum of all ranks' values: each fills in its own and leaves zeros elsewhere.

        A sum of one value and zeros does not round, so the number of ranks changes no bit.
        """
        if self.num_ranks == 1:
            return values
        travelling = values.cpu().clone()
        with lost_ranks():
            distributed.all_reduce(travelling)
        # A ring passes every part around twice: once to sum it, once to share the sum.
        self._count(what, 2 * travelling.nbytes * (self.num_ranks - 1) / self.num_ranks)
        return travelling.to(values.device)

    def sum_in_order(self, parts: Tensor, *, what: str = "gradients") -> Tensor:
        """Sum rows [parts, N] of all ranks in the order of their numbers; part p of rank r is p * ranks + r.

        One process that computes all parts sums in the same order, so the number of ranks changes no bit.
        Every rank sums its share of the columns and sends it to the others: with one part each, the bytes of
        an all-reduce.  The sum on a CPU is overwritten by the next call.
        """
        num_parts, width = parts.shape
        padded, found, every = self._buffers(num_parts, width, parts.dtype)
        padded[:, :width] = parts
        # [parts, ranks, share] to [ranks, parts, share]: rank r is sent its columns of every part.
        given = padded.view(num_parts, self.num_ranks, -1).transpose(0, 1).contiguous()
        with lost_ranks():
            distributed.all_to_all_single(found, given)
            total = fold(found.transpose(0, 1).reshape(-1, given.shape[-1]))
            if self._carrier.type == "cuda":
                distributed.all_gather(list(every.split(len(total))), total)
            else:  # gloo's all_gather makes a copy of everything in fresh memory
                padded[0].view(self.num_ranks, -1).copy_(total)
                distributed.all_to_all_single(every, padded[0])
        self._count(what, (num_parts + 1) * total.nbytes * (self.num_ranks - 1))
        return every[:width].to(parts.device)

    def _buffers(self, num_parts: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return what an exchange sends, receives and ends with; the ranks divide the columns.

        The system hands out fresh memory a page at a time, which on a CPU takes longer than the exchange, so
        the buffers of the last exchange are used again.  A GPU's allocator keeps its memory anyway.
        """
        wanted = (num_parts, width, dtype)
        if self._kept is None or self._kept[0] != wanted:
            share = -(-width // self.num_ranks)
            on_cpu = self._carrier.type == "cpu"
            buffers = (
                torch.zeros(num_parts, share * self.num_ranks, dtype=dtype, device=self._carrier),
                torch.empty(self.num_ranks, num_parts, share, dtype=dtype, device=self._carrier),
                torch.empty(share * self.num_ranks, dtype=dtype, device=self._carrier),
            )
            if (
                on_cpu and self.device.type == "cuda"
            ):  # copies to and from a GPU are faster from pinned memory
                buffers = buffers[0].pin_memory(), buffers[1], buffers[2].pin_memory()
            if not on_cpu:
                return buffers
            self._kept = wanted, buffers
        return self._kept[1]

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return bool(self.gather(torch.tensor(float(flag))) > 0)

    def share_weights(self, module: nn.Module) -> None:
        """Copy the first rank's weights of a module to every rank."""
        if self.num_ranks > 1:
            with torch.no_grad(), lost_ranks():
                for tensor in module.state_dict().values():
                    travelling = tensor.to(self._carrier)
                    distributed.broadcast(travelling, src=0)
                    self._count("weights", travelling.nbytes if self.first else 0)
                    tensor.copy_(travelling)

    def texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order."""
        return [text] if self.meeting is None else self.meeting.gather(text)

    def agree(self, what: str, value: object) -> None:
        """Raise BadInput unless every rank has the same value."""
        if self.meeting is not None:
            self.meeting.agree(what, value)

    def _count(self, what: str, num_bytes: float) -> None:
        self.sent_bytes[what] += round(num_bytes)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may hang in a collective; destroying the group would wait for them.
        if self.num_ranks > 1 and error is None:
            self.any(False)  # nobody leaves before all are done
            distributed.destroy_process_group()


def fold(parts: Tensor) -> Tensor:
    """Sum rows one after the other, in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _name_of(device: torch.device) -> str:
    """Return a name that no other device has; any number of processes may share a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def device_name(device: torch.device) -> str:
    """Return the name of a device: the GPU's, or the CPU's if it is known."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return read_host().cpu_model or "CPU"


def choose_device(name: str, *, local_rank: int = 0) -> torch.device:
    """Choose the device of this process: its own GPU, or the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise BadInput(f"no device {name!r}", hint="use auto, cpu or cuda")
    if name == "cpu" or name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput("torch sees no GPU here", hint="omit --device, or use cpu")
    # srun may show each process one GPU only; with fewer GPUs than processes, some share one.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
