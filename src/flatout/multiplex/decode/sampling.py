"""The next token of every row.

One uniform number in [0, 1) per row, keyed by (seed, request key, position), is mapped through the inverse of
the row's cumulative distribution.  Nothing depends on the slot or on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Temperature 0 takes the likeliest token; `top_k`, then `top_p`, restrict the choice otherwise."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.temperature < 0:
            raise BadInput(
                f"temperature={self.temperature} is below 0", hint="give 0 for greedy, above 0 to sample"
            )
        if self.top_k is not None and self.top_k < 1:
            raise BadInput(f"top_k={self.top_k} is below 1", hint="give at least 1, or None for no limit")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput(
                f"top_p={self.top_p} is not above 0 and at most 1", hint="omit it, or give None for no limit"
            )


def pick(
    logits: Tensor,
    sampling: Sampling,
    *,
    keys: Tensor,
    positions: Tensor,
    stream: Tensor | None = None,
) -> Tensor:
    """Pick a token [n] for each row of logits [n, V]; `positions` are where the tokens will stand.

    `stream` is `noise.uniform_key` of the seed, for a step that is compiled.
    """
    from flatout.multiplex.noise.draws import uniforms

    if sampling.temperature == 0:
        return logits.argmax(-1)
    draw = uniforms(seed=sampling.seed, keys=keys, positions=positions, stream=stream)[:, None]
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None:
        scores, tokens = scores.topk(min(sampling.top_k, scores.shape[-1]), dim=-1)
    elif sampling.top_p is not None:
        scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
    else:
        return _drawn(scores.softmax(-1), draw)[:, 0]
    share = scores.softmax(-1)
    if sampling.top_p is not None:  # a token stays if those before it hold less than top_p
        share = share.masked_fill(share.cumsum(-1) - share >= sampling.top_p, 0)
    return tokens.gather(-1, _drawn(share, draw))[:, 0]


def _drawn(share: Tensor, draw: Tensor) -> Tensor:
    """Return the column [n, 1] at which the cumulated share of a row passes `draw` of its total."""
    cumulated = share.cumsum(-1)
    passed = cumulated <= draw * cumulated[:, -1:]
    return passed.sum(-1, keepdim=True).clamp(max=share.shape[-1] - 1)
