"""Tiny models that the hand-written step can run, and how far it is from the materialised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.multiplex.decoder import Decoder
from flatout.multiplex.factors import Factors
from flatout.multiplex.rows import Rows
from flatout.multiplex.runner import State
from tests.materialised import logits_of
from tests.tiny_models import VOCABULARY, tiny_model

FAMILIES = ("llama", "qwen2", "qwen3")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def fusible_model(family: str = "llama", **changes: Any) -> Any:
    """Heads of width 32: the smallest that the step takes."""
    return tiny_model(family, **{**SIZES, **changes})


def integer_factors(
    decoder: Decoder, *, num_variants: int, rank: int, scale: float = 5e-5
) -> dict[str, Factors]:
    """Int8 factors of every product, large enough to change the logits by a good part."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(width: int) -> Tensor:
        shape = (num_variants, rank, width)
        return torch.randint(-60, 60, shape, dtype=torch.int8, generator=generator).to(decoder.device)

    return {
        name: Factors(drawn(one.weight.shape[1]), drawn(one.weight.shape[0]), scale)
        for name, one in decoder.projections().items()
    }


def largest_error(
    decoder: Decoder, factors: dict[str, Factors], rows: Rows, *, tile: int = 1, num_steps: int = 2
) -> float:
    """Prefill prompts of different lengths, decode greedily, and compare every row's logits with those of its
    materialised weights: the largest relative error of a row."""
    from flatout.multiplex.kernels.obstacles import why_not
    from flatout.multiplex.kernels.step import FusedStep

    assert why_not(decoder, factors) is None
    state = State.empty(decoder, slots=len(rows), max_tokens=20, eos=())
    state.tables.write(range(len(rows)), rows)
    state.cache.storage.fill_(7.0)  # what a row has not written must not matter
    layers = range(len(decoder.blocks))
    step = FusedStep(
        decoder,
        keys=[state.cache.keys(layer) for layer in layers],
        values=[state.cache.values(layer) for layer in layers],
        tables=state.tables,
        factors=factors,
        tile=tile,
    )
    ids = torch.randint(0, VOCABULARY, (len(rows), 4), generator=torch.Generator().manual_seed(0)).to(
        decoder.device
    )
    lengths = [4 - row % 3 for row in range(len(rows))]
    step.prefill(ids, torch.arange(len(rows), device=decoder.device))
    ends = torch.tensor(lengths, device=decoder.device) - 1
    state.token.copy_(ids.gather(1, ends[:, None])[:, 0])
    state.position.copy_(ends)
    state.alive.fill_(True)
    state.limit.fill_(100)
    texts = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
    found = []
    for _ in range(num_steps):
        logits = step.decode(state.token, state.position).clone()
        found.append(logits.float())
        step.best(logits)
        step.append(state)
        assert torch.equal(state.token, logits.argmax(-1))
        for text, token in zip(texts, state.token.tolist(), strict=True):
            text.append(token)
    errors = []
    for row, (text, variant) in enumerate(zip(texts, rows.variants, strict=True)):
        sign = 1 if rows.signs is None else rows.signs[row]
        whole = logits_of(decoder, torch.tensor(text[:-1], device=decoder.device), factors, variant, sign)
        ours, wanted = torch.stack([step[row] for step in found]), whole[-num_steps:]
        errors.append(float((ours - wanted).norm() / wanted.norm()))
    return max(errors)
