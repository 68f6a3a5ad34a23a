"""FO506 full-vocabulary-logits

What it does
Finds 32-bit logits over a whole vocabulary that take much of the memory.

Why it costs
Logits take batch times length times vocabulary numbers of four bytes: 8 sequences of 2,048 tokens over
128,000 words are 8 GiB, once as logits, once as their softmax and once as their gradient. They set the
peak, and with it the largest batch that fits.

Evidence
float32 tensors with a last dimension of at least 16,384, all made in one step, hold at least 40 % of the
peak memory. The reported line makes the first of them. There is no share and no ceiling: the cost is
memory, and computing the loss in pieces is not faster.

Fix
Compute the loss in pieces or by a fused kernel, for the positions that are scored:

```diff
-loss = loss_of(hidden, labels)                     # projects to the vocabulary, then cross entropy
+pieces = zip(hidden.split(1024), labels.split(1024))
+loss = sum(checkpoint(loss_of, piece, label, use_reentrant=False) for piece, label in pieces)
```

Compute logits only for the positions that are scored: `model(..., logits_to_keep=n)` in transformers.

Fix safety
Reordered: the same sum in another order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import share_of
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence

RULE = title_of(__doc__)
FEWEST_WORDS = 16_384
LEAST_SHARE = 0.40


def detect(evidence: Evidence) -> list[Finding]:
    memory = evidence.memory
    if memory is None:
        return []
    logits = [
        tensor
        for tensor in memory.largest
        if tensor.dtype == "float32" and len(tensor.shape) > 1 and tensor.shape[-1] >= FEWEST_WORDS
    ]

    held = sum(tensor.num_bytes for tensor in logits)
    share = share_of(held, memory.peak_bytes)
    places = [tensor.place for tensor in logits if tensor.place is not None]
    if share is None or share < LEAST_SHARE or len(logits) < 2 or not places:
        return []
    largest = logits[0]
    return [
        RULE.finding(
            places[0],
            f"logits over {largest.shape[-1]} words in 32 bits hold {show_share(share)} of the peak memory",
            figures=tuple(
                f"{tensor.op}: {' x '.join(map(str, tensor.shape))}, {show_bytes(tensor.num_bytes)}"
                for tensor in logits[:4]
            ),
        )
    ]
