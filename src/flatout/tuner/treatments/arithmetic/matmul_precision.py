"""Multiply matrices of 32-bit numbers on tensor cores (TF32)."""

from __future__ import annotations

from flatout.measure.patches import Patches
from flatout.tuner.treatment import Case, Treatment, Value, reversible


def propose(case: Case) -> list[Value]:
    """Propose it on GPUs that have TF32, if it is off."""
    evidence = case.evidence
    precision, gpu = evidence.precision, evidence.gpu
    if gpu is None or precision is None or precision.tf32_matmul is not False or precision.autocast:
        return []
    major = (gpu.compute_capability or "0").partition(".")[0]
    return ["high"] if major.isdigit() and int(major) >= 8 else []


def install(patches: Patches, value: Value) -> None:
    import torch

    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def put_back() -> None:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions

    patches.on_undo(put_back)
    torch.set_float32_matmul_precision(str(value))
    torch.backends.cudnn.allow_tf32 = True


TREATMENT = Treatment(
    propose,
    install,
    "multiply 32-bit matrices with 10 bits of mantissa (TF32)",
    safety="lossy",
    switch=reversible(install),
)
