"""FO401 no-mixed-precision

What it does
Finds a model call that multiplies matrices in 32 bits on a GPU with 16-bit tensor cores. Parameters are
float32, and the call does not run under autocast.

Why it costs
The datasheet of an H200 gives 67 TFLOPS for fp32, 494 for TF32 and 989 for bf16, dense: the same matrix
product may take a fourteenth of the time. Activations also take half the memory, and half the time to read.

Evidence
On a GPU of compute capability 7.0 (fp16) or 8.0 (bf16) or above. The ceiling is measured: steps with
autocast switched on. Autocast is tried if fp32 and TF32 matrix products hold at least 10 % of the step.

Fix
```diff
-loss = loss_fn(model(x), y)
+with torch.autocast("cuda", dtype=torch.bfloat16):
+    loss = loss_fn(model(x), y)
 loss.backward()
```

GPUs before Ampere have no bf16: use `torch.float16` with `torch.amp.GradScaler`. A smaller change that
keeps the 32-bit range everywhere is `torch.set_float32_matmul_precision("high")`, which allows TF32.

Fix safety
Lossy: 16-bit products have 8 (bf16) or 11 (fp16) significant bits instead of 24. Weights and sums stay in
float32. Compare loss curves over several seeds.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at, on_gpu, share_of
from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence, Gpu, Kernels, ModuleCall

ARMS = ("autocast",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
EXPLAINS = ("FO402",)
TUNE = ("autocast", "matmul-precision")
WIDE = ("fp32", "float32", "tf32")
FLOAT32 = ("float32", "torch.float32", "fp32")


def detect(evidence: Evidence) -> list[Finding]:
    kernels, gpu = evidence.kernels, evidence.gpu
    if not on_gpu(evidence) or gpu is None or kernels is None or not _computes_in_float32(evidence):
        return []
    target = _narrow_format(gpu)
    if target is None:
        return []
    call = _training_call(evidence)
    place = call.place if call is not None else None
    if arm_at(evidence, ARMS[0], place) is None:
        return []
    share = share_of(_wide_products_s(kernels), kernels.step_s)
    profiled = show_seconds(kernels.step_s)
    figures = [
        f"{name} matrix products: {show_seconds(seconds)} of {profiled} per profiled step"
        for name, seconds in sorted(kernels.matmul_s_by_dtype.items())
    ]
    figures.append(f"the GPU is busy {show_share(kernels.busy_share)} of the step")
    scaler = "" if target == "bf16" else " with torch.amp.GradScaler"
    dtype = "torch.bfloat16" if target == "bf16" else "torch.float16"
    return RULE.proven(
        evidence,
        place,
        f"32-bit matrix products hold {show_share(share)} of the step; {gpu.name} has {target} units",
        figures=figures,
        share=share or None,
        fix=by_argument(
            evidence,
            f'run this forward under torch.autocast("cuda", dtype={dtype}){scaler}',
            transformers=f"TrainingArguments({target}=True)",
            lightning=f'Trainer(precision="{"bf16" if target == "bf16" else "16"}-mixed")',
        ),
    )


def _wide_products_s(kernels: Kernels) -> float:
    return sum(seconds for dtype, seconds in kernels.matmul_s_by_dtype.items() if dtype in WIDE)


def _computes_in_float32(evidence: Evidence) -> bool:
    precision = evidence.precision
    if precision is None or not precision.parameter_dtypes:
        return False
    if precision.autocast is not None and _training_call(evidence) is None:
        return False
    return all(dtype in FLOAT32 for dtype in precision.parameter_dtypes)


def _narrow_format(gpu: Gpu) -> str | None:
    """Return the 16-bit format that this GPU's tensor cores take."""
    major, _, minor = (gpu.compute_capability or "").partition(".")
    if not major.isdigit() or (minor and not minor.isdigit()):
        return None
    capability = (int(major), int(minor or 0))
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else None


def _training_call(evidence: Evidence) -> ModuleCall | None:
    """Return the longest outermost model call of the training step that runs without autocast."""
    calls = [
        call
        for call in evidence.module_calls
        if call.training and call.has_parameters and call.autocast is None
    ]
    return max(calls, key=lambda call: (call.host_s or 0.0, call.calls_per_step), default=None)
