"""Cross-entropy over a vocabulary whose logits are never held whole.

Logits are cheap to compute and large to keep: 2,048 target tokens against 50,000 words are 400 MB in float32,
and autograd keeps them, their softmax and its gradient.  But the loss of a token needs only its own row, and
the gradient of that row is known at once: softmax minus one at the target.  So a few hundred rows at a time
are computed, reduced to their loss and to their gradient in `hidden`, and freed.  The backward only scales,
and no product is computed twice.

Legend: M target tokens, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # as torch's cross_entropy
MAX_CHUNK_BYTES = 128 * 2**20  # of float32 logits


def rows_per_chunk(vocabulary: int, *, max_bytes: int = MAX_CHUNK_BYTES) -> int:
    """Return how many rows of logits fit `max_bytes`; at least one."""
    return max(1, max_bytes // (4 * vocabulary))


def chunked_cross_entropy(
    hidden_MH: Tensor,
    embedding_VH: Tensor,
    targets_M: Tensor,
    *,
    bias_V: Tensor | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Tensor:
    """Return the mean cross-entropy of softmax(hidden @ embedding.T + bias), IGNORED targets left out."""
    rows = rows_per_chunk(len(embedding_VH), max_bytes=max_chunk_bytes)
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_MH, embedding_VH, bias_V, targets_M, rows
    )
    return loss / (targets_M != IGNORED).sum().clamp_min(1)


def chunked_argmax(
    hidden_MH: Tensor,
    embedding_VH: Tensor,
    *,
    bias_V: Tensor | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Tensor:
    """Return the most likely word at each of M places."""
    rows = rows_per_chunk(len(embedding_VH), max_bytes=max_chunk_bytes)
    hidden_MH, embedding_VH = _alike(hidden_MH, embedding_VH)
    best = [_logits(hidden_MH[part], embedding_VH, bias_V).argmax(1) for part in _parts(len(hidden_MH), rows)]
    return torch.cat(best) if best else hidden_MH.new_empty(0, dtype=torch.int64)


def _parts(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, length, rows))


def _alike(hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to the dtype of the logits: autocast's, else the embedding's."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedding.dtype
    return hidden.to(dtype), embedding.to(dtype)


def _logits(hidden: Tensor, embedding: Tensor, bias: Tensor | None) -> Tensor:
    logits = (hidden @ embedding.T).float()
    return logits if bias is None else logits.add_(bias.float())


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the losses; gradients are computed in forward, where each chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, bias: Tensor | None, targets: Tensor, rows: int
    ) -> Tensor:
        wants_hidden, wants_embedding, wants_bias = ctx.needs_input_grad[:3]
        hidden_like, embedding_like = _alike(hidden, embedding)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        embedding_grad = torch.zeros_like(embedding) if wants_embedding else None
        bias_grad = torch.zeros_like(bias) if wants_bias and bias is not None else None
        loss = hidden.new_zeros((), dtype=torch.float32)
        for part in _parts(len(hidden), rows):
            logits = _logits(hidden_like[part], embedding_like, bias)
            real = (targets[part] != IGNORED).unsqueeze(1)
            places = targets[part].clamp_min(0).unsqueeze(1)
            logits -= logits.logsumexp(1, keepdim=True)
            loss -= (logits.gather(1, places) * real).sum()
            if not any(ctx.needs_input_grad):
                continue
            slope = logits.exp_().scatter_add_(1, places, logits.new_full((), -1.0).expand_as(places))
            slope *= real
            small = slope.to(embedding_like.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = small @ embedding_like
            if embedding_grad is not None:
                embedding_grad += small.T @ hidden_like[part]
            if bias_grad is not None:
                bias_grad += slope.sum(0)
        ctx.save_for_backward(hidden_grad, embedding_grad, bias_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        # In float32: a loss scale of 2**16 is more than float16 can hold.
        slopes = (
            None if slope is None else (slope * scale.view(1)).to(slope.dtype) for slope in ctx.saved_tensors
        )
        return (*slopes, None, None)
