"""FO409 misaligned-dimensions

What it does
Finds linear layers whose sizes keep tensor cores from loading whole pieces. A vocabulary of 50257 words is
an example.

Why it costs
Tensor cores read 16-bit numbers 16 bytes at a time. A row whose length is not a multiple of 8 starts in the
middle of such a piece, and the product falls back to a slower kernel, forward and backward. One language
model trained 25 % faster with 50304 words instead of 50257: the 47 extra words, which no text contains,
cost nothing.

Evidence
On a GPU, products in 16 bits or TF32 hold at least 10 % of the step, and weights with a size that is not
divisible by 8 hold at least 10 % of all weights. The ceiling is measured: steps in which these layers are
padded with zeros to the next multiple of 64. Without a measured gain there is no finding: recent kernels
handle many sizes well.

Fix
Round the layer's sizes up to multiples of 64. Targets stay as they are:

```diff
-vocabulary_size = len(tokenizer)
+vocabulary_size = 64 * math.ceil(len(tokenizer) / 64)
-model.resize_token_embeddings(len(tokenizer))                          # in transformers
+model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
```

Fix safety
Lossy: the added words take part in the softmax, with a probability that training reduces to almost nothing.
Saved weights no longer load.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at, on_gpu
from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.measure.evidence import Evidence

ARMS = ("padded-products",)
RULE = title_of(__doc__, arms=ARMS)
NEEDS_PROOF = True


def detect(evidence: Evidence) -> list[Finding]:
    found = arm_at(evidence, ARMS[0], None) if on_gpu(evidence) else None
    if found is None:
        return []
    message = (
        f"a layer of {found.value} is computed by slower kernels than one whose sizes are multiples of 64"
    )
    figure = f"{found.value}: these sizes are not multiples of 8, so rows start inside a piece"
    return RULE.proven(evidence, found.place, message, figures=(figure,))
