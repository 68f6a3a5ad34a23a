"""FO402 full-precision-matmul

What it does
Finds 32-bit matrix products that a GPU computes without its tensor cores.

Why it costs
Since Ampere, GPUs have units that round the factors of a product to 10 significant bits (TF32) and add in
32: the datasheet of an H200 gives 494 TFLOPS for them, and 67 without. torch leaves them off by default.

Evidence
On a GPU of compute capability 8.0 or above, TF32 is off, and 32-bit products hold at least 10 % of the
step. The ceiling is measured: steps with TF32 products. If autocast frees more, no-mixed-precision reports
the same call instead.

Fix
```diff
-torch.set_float32_matmul_precision("highest")   # or nothing: it is the default
+torch.set_float32_matmul_precision("high")
```

Fix safety
Lossy: products have 10 significant bits of mantissa instead of 23. Compare loss curves over several seeds.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at, on_gpu, share_of
from flatout.doctor.finding import Finding, by_argument
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("tf32",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("matmul-precision",)
LEAST_SHARE = 0.10


def detect(evidence: Evidence) -> list[Finding]:
    kernels, precision, arm = evidence.kernels, evidence.precision, arm_at(evidence, ARMS[0], None)
    if not on_gpu(evidence) or kernels is None or precision is None or precision.tf32_matmul is not False:
        return []
    seconds = sum(kernels.matmul_s_by_dtype.get(name, 0.0) for name in ("fp32", "float32"))
    share = share_of(seconds, kernels.step_s)
    if arm is None or share is None or share < LEAST_SHARE:
        return []
    return RULE.proven(
        evidence,
        arm.place,
        f"products of 32-bit numbers run without tensor cores, {show_share(share)} of the step",
        figures=(f"{show_seconds(seconds)} of a profiled step of {show_seconds(kernels.step_s)}",),
        share=share,
        fix=by_argument(
            evidence,
            'torch.set_float32_matmul_precision("high")',
            transformers="TrainingArguments(tf32=True)",
        ),
    )
