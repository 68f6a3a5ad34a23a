"""Steps whose batches lie where copying them costs less: in page-locked memory, or already on the GPU.

A copy from ordinary memory goes through a buffer of the driver, and the host waits for it.  A copy from
page-locked memory runs beside the kernels if the script asks for that (`non_blocking=True`), so the arm
changes both at once.  Batches that are already on the GPU show what copying costs at all.

Tensors that the step does not copy to the GPU stay where they are: the host often needs lengths, for
instance.  The block's first step, which is never timed, shows which tensors it copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.batches.served_batches import ServedBatches
from flatout.measure.batches import arrays_of, map_arrays, num_bytes
from flatout.measure.clock import ident
from flatout.measure.evidence import Place
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.patches import Patches

LEAST_SHARE = 0.02  # of the step
SPARE = 4  # batches may take this fraction (1/SPARE) of the GPU's free memory
KINDS = {"pinned": "staged", "device": "staged-on-device"}


class Staged(Arm):
    """Kept batches served from page-locked memory or from the GPU."""

    baseline = serves = "cached"

    def __init__(
        self,
        loaders: LoaderWatch,
        *,
        where: Literal["pinned", "device"],
        suspicion: float,
        place: Place | None = None,
        device: str = "cuda",
    ) -> None:
        self.kind = self.label = KINDS[where]
        self.where = where
        self.suspicion, self.place = suspicion, place
        self._loaders, self._device = loaders, device
        self._served = ServedBatches(loaders)
        self._patches = Patches()
        self._batches: list[Any] = []
        self._copied: set[int] = set()  # addresses of the tensors that the first step copied to the GPU
        self._is_staged = False

    def begin(self) -> None:
        import torch

        self._copied, self._is_staged = set(), False
        self._batches = self._served.begin()
        if not self._batches:
            self.refusal = "no batch was kept"
        for name in ("to", "cuda"):
            self._patches.replace(torch.Tensor, name, self._copy(getattr(torch.Tensor, name)))

    def step_end(self) -> None:
        if not self._is_staged and self.refusal is None:
            self._is_staged = True
            self._stage()

    def end(self) -> None:
        self._patches.undo()
        self._served.end()
        self._batches = []

    def release(self) -> None:
        self._patches.undo()

    def _copy(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(copy)
        def copy_without_waiting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type != "cpu" or ident() != self._loaders.clock.owner:
                return copy(tensor, *args, **kwargs)
            if self._is_staged and tensor.is_pinned() and not any(isinstance(value, bool) for value in args):
                kwargs["non_blocking"] = True
            result = copy(tensor, *args, **kwargs)
            if not self._is_staged and result.device.type == self._device:
                self._copied.add(tensor.data_ptr())
            return result

        return copy_without_waiting

    def _stage(self) -> None:
        copied = {
            position
            for batch in self._batches
            for position, array in enumerate(arrays_of(batch))
            if self._served.are_copied or _address(array) in self._copied
        }
        if not copied:
            self.refusal = "the step copies no tensor of its batches to the GPU as it comes"
        elif self.where == "device" and not self._has_room():
            self.refusal = "the GPU has no room for the kept batches"
        else:
            self._served.replace([self._move(batch, copied) for batch in self._batches])

    def _has_room(self) -> bool:
        import torch

        if self._device != "cuda":
            return True
        return sum(map(num_bytes, self._batches)) * SPARE < torch.cuda.mem_get_info()[0]

    def _move(self, batch: Any, positions: set[int]) -> Any:
        position = -1

        def move(array: Any) -> Any:
            nonlocal position
            position += 1
            if position not in positions or not _address(array):
                return array
            return array.detach().pin_memory() if self.where == "pinned" else array.detach().to(self._device)

        return map_arrays(batch, move)


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms if copies to the GPU take time, from pageable memory or with blocking calls."""
    copies = [site for site in context.sites if site.kind == "copy" and site.device == "cuda"]
    if context.device != "cuda" or not copies or context.loaders.trained_on() is None:
        return
    recorded = context.kernels.copies if context.kernels is not None else ()
    copied_s = sum(copy.total_s for copy in recorded if copy.kind.startswith("HtoD"))
    share = max(copied_s, context.phases_s.get("transfer", 0.0)) / context.step_s
    if share < LEAST_SHARE:
        return
    place = max(copies, key=lambda site: site.bytes_per_step or 0.0).place
    for where in ("pinned", "device"):
        if where == "device" or any(site.pinned is False or site.blocking for site in copies):
            yield Staged(context.loaders, where=where, suspicion=min(1.0, share), place=place)


def _address(array: Any) -> int:
    """Return the address of a host tensor; 0 for anything else."""
    on_host = hasattr(array, "detach") and array.device.type == "cpu"
    return int(array.data_ptr()) if on_host else 0
