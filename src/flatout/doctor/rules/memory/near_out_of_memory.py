"""FO502 near-out-of-memory

What it does
Finds a job whose tensors fill the GPU's memory to within a few percent.

Why it costs
A longer sequence, an evaluation or a second process ends the job, often after hours. On the way there, the
allocator releases its cache and asks the driver again, which stops the GPU.

Evidence
On a GPU, the peak of allocated memory is at least 94 % of the device's memory. There is no share and no
ceiling: what is at stake is the whole job.

Fix
Use a smaller batch and accumulate gradients; `flatout plan` says which batch fits. Or checkpoint
activations, or shard the optimizer's state:

```diff
-loader = DataLoader(dataset, batch_size=32)
+loader = DataLoader(dataset, batch_size=16)
-loss.backward()
+(loss / 2).backward()             # and step the optimizer every second batch
```

`flatout plan` says which batch fits, and what each of these saves.

Fix safety
Reordered: accumulated gradients are summed in another order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import on_gpu
from flatout.doctor.finding import Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
NEARLY_FULL = 0.94


def detect(evidence: Evidence) -> list[Finding]:
    gpu, memory = evidence.gpu, evidence.memory
    if not on_gpu(evidence) or gpu is None or not gpu.memory_bytes or memory is None or not memory.peak_bytes:
        return []
    full = memory.peak_bytes / gpu.memory_bytes
    if full < NEARLY_FULL:
        return []
    return [
        RULE.finding(
            training_call(evidence),
            f"the job's tensors fill {show_share(min(1.0, full))} of the GPU's memory at their peak",
            figures=(f"{show_bytes(memory.peak_bytes)} of {show_bytes(gpu.memory_bytes)} on {gpu.name}",),
        )
    ]
