"""The machine and the training in one line.

    GPU 8.2/16.0 GB (51 %) | util 85 % | CPU 45 % | loss 0.3245 | lr 5.2e-05 | 12.3 it/s

What the driver does not report is n/a: a question that failed is not an idle GPU.
"""

from __future__ import annotations

import psutil

from flatout.ground.units import UNKNOWN, show_share
from flatout.hardware.nvml import GpuReader
from flatout.hardware.snapshot import GpuSnapshot

GB = 1e9


class LiveLine:
    """Reads the GPU that this process runs on, and the host."""

    def __init__(self, *, cuda_index: int | None, reader: GpuReader | None = None) -> None:
        """Read GPU `cuda_index` of torch; None on a CPU, where the line has no GPU."""
        self._cuda_index = cuda_index
        self._reader = reader if reader is not None or cuda_index is None else GpuReader()
        psutil.cpu_percent()  # the share since this call is what the next one answers

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def render(
        self, *, loss: float | None = None, lr: float | None = None, steps_per_s: float | None = None
    ) -> str:
        """Read the machine and write the line."""
        parts = [] if self._cuda_index is None else self._gpu_parts()
        parts.append(f"CPU {show_share(psutil.cpu_percent() / 100)}")
        parts.append(f"loss {UNKNOWN if loss is None else f'{loss:.4g}'}")
        if lr is not None:
            parts.append(f"lr {lr:.2g}")
        if steps_per_s is not None:
            parts.append(f"{steps_per_s:.3g} it/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.3g} s/it")
        return " | ".join(parts)

    def _gpu_parts(self) -> list[str]:
        gpu = self._gpu()
        used = None if gpu is None else gpu.memory_used_bytes
        total = None if gpu is None else gpu.memory_total_bytes
        if used is None or not total:
            memory = f"GPU {UNKNOWN}"
        else:
            memory = f"GPU {used / GB:.1f}/{total / GB:.1f} GB ({show_share(used / total)})"
        return [memory, f"util {show_share(None if gpu is None else gpu.utilisation_share)}"]

    def _gpu(self) -> GpuSnapshot | None:
        assert self._reader is not None
        computing = self._reader.snapshot().computing
        return next((gpu for gpu in computing if gpu.cuda_index == self._cuda_index), None)
