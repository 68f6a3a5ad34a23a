"""Batches gathered from RaggedArrays, on the host or wholly on the GPU.

A dataset of a few gigabytes fits beside most models.  Once it lies on the GPU a batch is a handful of
kernels: no workers, no collate, no copies, and the CPU is free to launch the step.  One that does not fit
stays in host memory, mapped, and a batch is gathered there by NumPy and copied from page-locked memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flatout.data.batching import RowBatches
from flatout.data.ragged_arrays import RaggedArrays
from flatout.data.rows.padding import Pad
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes, show_share
from flatout.hardware.nvml import read_gpus
from flatout.measure.batches import map_arrays

HostOrDevice = Literal["host", "device"]


class DeviceDataset:
    """Batches on `device`, each one vectorised gather; no workers and no Python per sample.

    The arrays live on the GPU where they take at most `memory_share` of its free memory, else on the host;
    `placement` says which and why.  Batches come from a batch sampler (`TokenBudgetBatches`, `RowBatches`,
    or any iterable of index sequences), or are `batch_size` records at random.  `form` is "padded" or
    "packed"; `transform` maps each batch.
    """

    def __init__(
        self,
        arrays: RaggedArrays,
        *,
        device: torch.device | str,
        batches: Iterable[Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        pads: Mapping[str, Pad] | None = None,
        form: Literal["padded", "packed"] = "padded",
        place: Literal["auto", "host", "device"] = "auto",
        memory_share: float = 0.5,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        if (batches is None) == (batch_size is None):
            raise BadInput("give either batches or batch_size")
        if form not in ("padded", "packed"):
            raise BadInput(f"form={form!r} is neither 'padded' nor 'packed'")
        if batches is None and batch_size is not None:
            batches = RowBatches(len(arrays), rows=batch_size, drop_last=drop_last, seed=seed)
        self.arrays, self.device = arrays, torch.device(device)
        self.batches: Any = batches
        self.placement = choose_place(
            arrays.num_bytes, device=self.device, place=place, memory_share=memory_share
        )
        self._pads, self._form, self._transform = dict(pads or {}), form, transform
        self._names = arrays.check_names(None)
        on_device = self.placement.value == "device"
        self._rows = arrays.rows_on(self.device if on_device else None, pinned=self.device.type == "cuda")

    def gather(self, indices: Any) -> Any:
        """Gather the batch of these records, on `device`."""
        chosen = self.arrays.check_numbers(indices)
        if self._form == "padded":
            self.arrays.check_pads(chosen, self._pads)
            batch = self._rows.padded(chosen, self._names, self._pads)
        else:
            batch = self._rows.packed(chosen, self._names)
        if self.placement.value == "host" and self.device.type != "cpu":
            batch = map_arrays(batch, self._send)
        return batch if self._transform is None else self._transform(batch)

    def _send(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=values.is_pinned())

    def __iter__(self) -> Iterator[Any]:
        arrays = getattr(self.batches, "arrays", None)
        for indices in arrays() if arrays is not None else self.batches:
            yield self.gather(np.asarray(indices))

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next."""
        self._sampler("set_epoch").set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration: after the batches that were handed out."""
        state: dict[str, Any] = self._sampler("state_dict").state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved."""
        self._sampler("load_state_dict").load_state_dict(state)

    def _sampler(self, verb: str) -> Any:
        if not hasattr(self.batches, verb):
            raise BadInput(
                f"{type(self.batches).__name__} has no {verb}", hint="use a sampler of flatout.data"
            )
        return self.batches


def choose_place(
    num_bytes: int, *, device: torch.device, place: Literal["auto", "host", "device"], memory_share: float
) -> Decision[HostOrDevice]:
    """Choose whether data of `num_bytes` are kept on `device` or on the host."""
    if place not in ("auto", "host", "device"):
        raise BadInput(f"place={place!r} is not 'auto', 'host' or 'device'")
    if place == "device":
        return Decision(value="device", reason="asked for", source="assumed")
    if place == "host":
        return Decision(value="host", reason="asked for", source="assumed")
    if device.type != "cuda":
        return Decision(value="host", reason=f"{device.type} reads host memory", source="computed")
    free_bytes = free_device_bytes(device)
    limit = f"{show_share(memory_share)} of the {show_bytes(free_bytes)} free on {device}"
    if num_bytes <= memory_share * free_bytes:
        return Decision(value="device", reason=f"{show_bytes(num_bytes)} fit into {limit}", source="measured")
    return Decision(value="host", reason=f"{show_bytes(num_bytes)} exceed {limit}", source="measured")


def free_device_bytes(device: torch.device) -> int:
    """Return what torch can still take of a GPU: free by NVML, and unused in its allocator."""
    index = torch.empty(0, device=device).device.index  # "cuda" names no index
    gpu = next((gpu for gpu in read_gpus().computing if gpu.cuda_index == index), None)
    free = gpu.memory_free_bytes if gpu is not None else None
    if free is None:
        free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
