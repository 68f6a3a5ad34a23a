"""FO407 layout-transposes

What it does
Finds convolutions that each transpose their images to channels last, and back.

Why it costs
Tensor cores want the channels of a pixel side by side. If tensors store them apart, cuDNN transposes the
input and the result of every convolution, with kernels that only move memory. In one profile they took 32 %
of the convolutions' time.

Evidence
On a GPU, convolutions hold at least 10 % of the step and all of their weights store channels first. The
ceiling is measured: steps with weights in channels-last format, which the activations follow.

Fix
`model.to(memory_format=torch.channels_last)`, and the images likewise:

```diff
-images = images.to(device)
+model = model.to(memory_format=torch.channels_last)
+images = images.to(device, memory_format=torch.channels_last)
```

Fix safety
Reordered: other kernels add in another order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at, on_gpu, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.ground.units import show_seconds, show_share
from flatout.measure.evidence import Evidence

ARMS = ("channels-last",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True
TUNE = ("channels-last",)
LEAST_SHARE = 0.10


def detect(evidence: Evidence) -> list[Finding]:
    kernels = evidence.kernels
    if not on_gpu(evidence) or kernels is None or arm_at(evidence, ARMS[0], None) is None:
        return []
    seconds = kernels.by_category_s.get("convolution", 0.0)
    share = share_of(seconds, kernels.step_s)
    if share is None or share < LEAST_SHARE:
        return []
    turned = [
        kernel for kernel in kernels.top if "nhwc" in kernel.name.lower() and "nchw" in kernel.name.lower()
    ]
    return RULE.proven(
        evidence,
        training_call(evidence),
        f"convolutions with their channels first hold {show_share(share)} of the step",
        figures=(
            f"convolutions: {show_seconds(seconds)} of a profiled step of {show_seconds(kernels.step_s)}",
            *(f"{kernel.name}: {show_seconds(kernel.total_s)} per step" for kernel in turned[:2]),
        ),
        share=share,
    )
