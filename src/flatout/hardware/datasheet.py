"""What vendors promise: memory, bandwidth and dense peak rates of the GPUs that people train on.

Reading a datasheet is harder than it looks, so every figure here follows five rules.

*Dense.*  Vendors print rates "with sparsity", which count products that are never computed.  Those are
halved here.

*fp32 accumulation.*  PyTorch sums fp16 and bf16 products in fp32.  GeForce cards do that at half the rate
of fp16 sums, which is the rate their advertising shows; the slower one stands here, and
`half_rate_accumulate` marks such a card.  fp8 likewise.

*The fastest unit.*  Each dtype stands at the rate of the fastest unit that computes in it: the matrix unit
where it can (A100 fp64: 19.5, not 9.7), else the vector unit.  A dtype the chip cannot compute in, or only
more slowly than in fp32, is absent; fp64 is always given.

*Memory.*  Vendors write "GB" and mean GiB, less what error correction takes: a "16 GB" T4 has 15360 MiB.
`reported_mib` is the total that the driver reports, where it is on record.  Without it the decimal reading
of the sold size stands in, which every card on record offers at least.

*Multiprocessors.*  Kernels that fill the GPU size their partial results by them.  Their number is the CUDA
cores of the vendor's tables over those of one multiprocessor (64 or 128); clock and fp32 rate must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
DTYPES: tuple[Dtype, ...] = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet:
    """One GPU as its vendor describes it."""

    name: str
    vendor: Literal["NVIDIA", "AMD"]
    architecture: str
    compute_capability: str | None  # NVIDIA's; AMD names an architecture such as gfx942 instead
    sold_gb: int
    reported_mib: int | None
    bandwidth_bytes_per_s: float
    peak_flops: dict[str, float]  # dense, per second; int8 counts integer operations
    half_rate_accumulate: bool
    multiprocessors: int | None  # NVIDIA's
    driver_names: tuple[str, ...]  # what NVML and torch call it
    aliases: tuple[str, ...]
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.sold_gb * 10**9 if self.reported_mib is None else self.reported_mib * 2**20

    @property
    def bf16(self) -> bool:
        return "bf16" in self.peak_flops


def make_datasheet(
    name: str,
    architecture: str,
    compute_capability: str | None,
    sold_gb: int,
    reported_mib: int | None,
    bandwidth_gb_per_s: float,
    *,
    source: str,
    drivers: tuple[str, ...],
    aliases: tuple[str, ...] = (),
    half_rate_accumulate: bool = False,
    multiprocessors: int | None = None,
    **peak_tflops: float,
) -> Datasheet:
    """Make a row of the table: memory as sold (GB) and as the driver reports it (MiB), peaks in TFLOP/s."""
    return Datasheet(
        name=name,
        vendor="NVIDIA" if compute_capability else "AMD",
        architecture=architecture,
        compute_capability=compute_capability,
        sold_gb=sold_gb,
        reported_mib=reported_mib,
        bandwidth_bytes_per_s=bandwidth_gb_per_s * 1e9,
        peak_flops={dtype: round(peak_tflops[dtype] * 1e12, 0) for dtype in DTYPES if dtype in peak_tflops},
        half_rate_accumulate=half_rate_accumulate,
        multiprocessors=multiprocessors,
        driver_names=drivers,
        aliases=aliases,
        source=source,
    )
