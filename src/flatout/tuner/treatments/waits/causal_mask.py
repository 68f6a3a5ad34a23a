"""Ask once whether a mask of a TransformerEncoder or TransformerDecoder is causal.

Called without `is_causal`, both build a causal mask in every forward, compare it with the given one and read
the answer back, for which the host waits for the GPU.  A mask that nobody wrote to has the answer it had.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from flatout.measure.patches import Patches, keep_out_of_graphs
from flatout.tuner.treatment import Case, Treatment, Value, reversible

MADE = re.compile(r"\bTransformer(En|De)?(coder)?\(")
MOST_MASKS = 64


def propose(case: Case) -> list[Value]:
    """Propose it if the script makes such a module and a mask, and never says what the mask is."""
    source = case.source
    asks = MADE.search(source) and "mask" in source and "is_causal" not in source
    return [True] if asks else []


class _Answers:
    """What torch said of the masks that it saw."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | None], tuple[weakref.ref[Any], int, bool]] = {}

    def of(self, mask: Any, inputs: Any, module: Any, *, given: bool | None) -> bool | None:
        """Return the answer that was given, or torch's own, which may be known."""
        from torch.nn.modules import transformer

        if given is not None or mask is None or mask.is_inference():
            return given
        size = transformer._get_seq_len(inputs, module.layers[0].self_attn.batch_first)
        found = self._known.get(key := (id(mask), size))
        if found is not None and found[1] == mask._version and found[0]() is mask:
            return found[2]
        answer = bool(transformer._detect_is_causal_mask(mask, None, size))
        if len(self._known) >= MOST_MASKS:  # a script that makes one for every forward
            self._known.clear()
        self._known[key] = weakref.ref(mask), mask._version, answer
        return answer


def install(patches: Patches, _value: Value) -> None:
    from torch import nn

    answers = _Answers()
    keep_out_of_graphs(_Answers.of)

    @patches.around(nn.TransformerEncoder, "forward")
    def encode(
        real: Any,
        module: Any,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        is_causal = answers.of(mask, src, module, given=is_causal)
        return real(module, src, mask, src_key_padding_mask, is_causal)

    @patches.around(nn.TransformerDecoder, "forward")
    def decode(
        real: Any,
        module: Any,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Any:
        tgt_is_causal = answers.of(tgt_mask, tgt, module, given=tgt_is_causal)
        padding = tgt_key_padding_mask, memory_key_padding_mask
        return real(module, tgt, memory, tgt_mask, memory_mask, *padding, tgt_is_causal, memory_is_causal)


TREATMENT = Treatment(
    propose,
    install,
    "ask once whether a mask of a TransformerEncoder is causal",
    safety="exact",
    switch=reversible(install),
)
