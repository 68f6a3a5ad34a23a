"""FO401 no-mixed-precision

What it does
Finds a model that multiplies matrices in 32 bits on a GPU with 16-bit tensor cores. Parameters are
float32 and no autocast is active.

Why it costs
The datasheet of an H200 gives 67 TFLOPS for fp32, 494 for TF32 and 989 for bf16, dense: the same matrix
product may take a fourteenth of the time. Activations take half the memory as well, and half the time
to read.

Evidence
On a GPU of compute capability 7.0 (fp16) or 8.0 (bf16) or above: fp32 and TF32 matrix products hold at
least 20 % of the step and the GPU is busy for at least half of it; a job that takes as long on half its
batch is left alone, since launches and not arithmetic fill its step. The ceiling is computed: those
products sped up by the ratio of the datasheet's peaks, and everything else as it is.

Fix
```python
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = loss_fn(model(x), y)
loss.backward()
```

Before Ampere there is no bf16: use `torch.float16` with `torch.amp.GradScaler`. A smaller step that keeps
32-bit range everywhere is `torch.set_float32_matmul_precision("high")`, which allows TF32.

Fix safety
Lossy: 16-bit products have 8 (bf16) or 11 (fp16) significant bits instead of 24. Weights and sums stay in
float32. Compare loss curves over several seeds.
"""

from __future__ import annotations

from flatout.doctor.ceilings import computed_ceiling, on_gpu, rows_cost_nothing, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_ratio, show_seconds, show_share
from flatout.measure.evidence import Evidence, Gpu, Kernels, ModuleCall

RULE = title_of(__doc__)
LEAST_MATMUL_SHARE = 0.20
LEAST_BUSY_SHARE = 0.5
LEAST_SPEEDUP = 1.05
WIDE = {"fp32": ("fp32", "float32"), "tf32": ("tf32",)}
NARROW = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16")}
FLOAT32 = ("float32", "torch.float32", "fp32")


def detect(evidence: Evidence) -> list[Finding]:
    kernels, gpu = evidence.kernels, evidence.gpu
    if not on_gpu(evidence) or kernels is None or gpu is None or not _computes_in_float32(evidence):
        return []
    target = _narrow_format(gpu)
    if target is None or rows_cost_nothing(evidence):
        return []
    matmul_s = {name: _known(kernels.matmul_s_by_dtype, names) or 0.0 for name, names in WIDE.items()}
    share = share_of(sum(matmul_s.values()), kernels.step_s)
    if share is None or share < LEAST_MATMUL_SHARE:
        return []
    if kernels.busy_share is None or kernels.busy_share < LEAST_BUSY_SHARE:
        return []
    freed_s = _freed_s(matmul_s, gpu=gpu, target=target)
    freed_share = share_of(freed_s, kernels.step_s)
    if freed_share is not None and 1 / (1 - freed_share) < LEAST_SPEEDUP:
        return []
    return [_finding(evidence, kernels, gpu, share=share, freed_share=freed_share, target=target)]


def _computes_in_float32(evidence: Evidence) -> bool:
    precision = evidence.precision
    if precision is None or precision.autocast is not None or not precision.parameter_dtypes:
        return False
    if any(call.autocast is not None for call in evidence.module_calls):
        return False
    return all(dtype in FLOAT32 for dtype in precision.parameter_dtypes)


def _narrow_format(gpu: Gpu) -> str | None:
    """The 16-bit format this GPU's tensor cores take."""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    if not major.isdigit() or (minor and not minor.isdigit()):
        return None
    capability = (int(major), int(minor or 0))
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else None


def _known(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    """The value under any of the names one format goes by."""
    return next((values[name] for name in names if name in values), None)


def _freed_s(matmul_s: dict[str, float], *, gpu: Gpu, target: str) -> float | None:
    """Seconds per step that the datasheet's peaks say would go; None when a peak is unknown."""
    narrow_peak = _known(gpu.peak_flops, NARROW[target])
    freed_s = 0.0
    for name, seconds in matmul_s.items():
        if seconds <= 0:
            continue
        wide_peak = _known(gpu.peak_flops, WIDE[name])
        if not narrow_peak or wide_peak is None:
            return None
        freed_s += seconds * (1 - min(wide_peak / narrow_peak, 1.0))
    return freed_s


def _training_call(evidence: Evidence) -> ModuleCall | None:
    """The outermost model call of the training step."""
    calls = [call for call in evidence.module_calls if call.training and call.has_parameters]
    return max(calls, key=lambda call: (call.host_s or 0.0, call.calls_per_step), default=None)


def _finding(
    evidence: Evidence,
    kernels: Kernels,
    gpu: Gpu,
    *,
    share: float,
    freed_share: float | None,
    target: str,
) -> Finding:
    call = _training_call(evidence)
    figures = [
        f"{name} matrix products: {show_seconds(seconds)} of {show_seconds(kernels.step_s)} per profiled step"
        for name, seconds in sorted(kernels.matmul_s_by_dtype.items())
    ]
    figures.append(f"the GPU is busy {show_share(kernels.busy_share)} of the step")
    for name, names in WIDE.items():
        wide, narrow = _known(gpu.peak_flops, names), _known(gpu.peak_flops, NARROW[target])
        if wide and narrow:
            figures.append(f"{gpu.name} datasheet: {target} is {show_ratio(narrow / wide)} of {name}")
    scaler = "" if target == "bf16" else " with torch.amp.GradScaler"
    dtype = "torch.bfloat16" if target == "bf16" else "torch.float16"
    return RULE.finding(
        call.place if call is not None else None,
        f"32-bit matrix products hold {show_share(share)} of the step; {gpu.name} has {target} units",
        figures=figures,
        share=share,
        ceiling=None if freed_share is None else computed_ceiling(evidence, freed_share=freed_share),
        fix=f'run this forward under torch.autocast("cuda", dtype={dtype}){scaler}',
        safety="lossy",
    )
