"""FO503 allocator-fragmentation

What it does
Finds a job whose free GPU memory is split into pieces that are too small for its requests.

Why it costs
Tensors of changing sizes leave holes. If no hole fits, the allocator waits for the GPU, returns its whole
cache to the driver and asks again: such a step takes several times as long, and the job can run out of
memory although memory is free.

Evidence
On a GPU, allocations had to be retried, or the allocator holds nine tenths of the device's memory while no
tensor uses at least a quarter of it. There is no share and no ceiling: the steps in which it happens are
not typical.

Fix
Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`:

```diff
-python train.py
+PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py
```

Pad sequences to a few lengths, and run the longest batch first.

Fix safety
Exact: only addresses change.
"""

from __future__ import annotations

from flatout.doctor.ceilings import on_gpu
from flatout.doctor.finding import Finding
from flatout.doctor.lines import training_call
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
TUNE = ("expandable-segments",)
UNUSED, HELD = 0.25, 0.9  # of the device's memory


def detect(evidence: Evidence) -> list[Finding]:
    gpu, memory = evidence.gpu, evidence.memory
    if not on_gpu(evidence) or gpu is None or not gpu.memory_bytes or memory is None:
        return []
    retries, reserved = memory.num_alloc_retries or 0, memory.reserved_bytes or 0
    unused = max(0, reserved - (memory.peak_bytes or 0))
    in_pieces = reserved >= HELD * gpu.memory_bytes and unused >= UNUSED * gpu.memory_bytes
    if not retries and not in_pieces:
        return []
    how = (
        f"allocations were retried {retries} times"
        if retries
        else f"{show_bytes(unused)} are split into pieces"
    )
    return [
        RULE.finding(
            training_call(evidence),
            f"free GPU memory does not fit what the job asks for: {how}",
            figures=(
                f"at the peak: {show_bytes(reserved)} reserved, {show_bytes(memory.peak_bytes)} in tensors",
            ),
        )
    ]
