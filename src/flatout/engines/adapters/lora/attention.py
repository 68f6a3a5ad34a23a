"""Attention over packed rows: no token sees beyond its own row, whatever rows lie beside it.

Hugging Face models hand query, key and value to a function that is chosen by name; ours is registered under
`PACKED`.  It finds rows by the layout of the current pass.  On a GPU of compute capability 8.0 or
more, in half precision, that is one variable-length kernel for all rows of all tasks: padding forms sequences
of its own, so there is no mask.  Elsewhere each run of blocks of one length is one call of scaled-dot-product
attention, with the padding masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.engines.adapters.lora.token_blocks import Layout
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput

PACKED = "flatout_packed"
AttentionKernel = Literal["varlen", "portable"]
WIDEST_HEAD, HEAD_STEP = 256, 8  # FlashAttention's, which is the variable-length kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBounds:
    """What attention reads of a pass."""

    layout: Layout
    cumulative: Tensor | None  # for the variable-length kernel
    key_masks: tuple[Tensor | None, ...]  # for the portable one


_bounds: ContextVar[RowBounds] = ContextVar("flatout_packed_rows")


def choose_kernel(
    *, device: torch.device, dtype: torch.dtype, head_width: int = HEAD_STEP
) -> Decision[AttentionKernel]:
    """Choose the attention kernel for this device, precision and width of a head."""
    if device.type != "cuda":
        return Decision(
            value="portable", reason=f"no variable-length kernel on {device.type}", source="computed"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return Decision(value="portable", reason=f"no variable-length kernel in {dtype}", source="computed")
    if head_width > WIDEST_HEAD or head_width % HEAD_STEP:
        return Decision(
            value="portable",
            reason=f"the variable-length kernel takes heads of 8, 16, ... {WIDEST_HEAD}, not of {head_width}",
            source="computed",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        version = ".".join(map(str, capability))
        return Decision(
            value="portable",
            reason=f"the variable-length kernel needs 8.0, this is {version}",
            source="computed",
        )
    return Decision(value="varlen", reason="one kernel for all rows, without a mask", source="computed")


def bounds_of(layout: Layout, kernel: AttentionKernel) -> RowBounds:
    """Return the tensors that this kernel needs for these rows."""
    if kernel == "varlen":
        return RowBounds(layout=layout, cumulative=layout.cumulative(), key_masks=())
    return RowBounds(layout=layout, cumulative=None, key_masks=layout.key_masks())


@contextmanager
def rows(bounds: RowBounds) -> Iterator[None]:
    """Set the rows that packed attention keeps apart inside the block."""
    token = _bounds.set(bounds)
    try:
        yield
    finally:
        _bounds.reset(token)


def register() -> None:
    """Make `PACKED` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from query, key and value [1, heads, N, width] to [1, N, heads, width]."""
    bounds = _bounds.get()
    unknown = [
        name for name in ("position_bias", "sliding_window", "softcap") if others.get(name) is not None
    ]
    if unknown or attention_mask is not None or others.get("is_causal") or key.shape[1] != query.shape[1]:
        raise BadInput(
            f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask, or heads that share keys'}",
            hint="packed rows support plain bidirectional attention only: use a BERT or RoBERTa",
        )
    # Not x[0]: its backward would fill a tensor of zeros.
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, bounds, scaling=scaling).unsqueeze(0), None


def attend(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, bounds: RowBounds, *, scaling: float | None
) -> Tensor:
    """Attend among packed tokens, [N, heads, width] in and out."""
    kernel = _portable if bounds.cumulative is None else _variable_length
    return kernel(q_NHD, k_NHD, v_NHD, bounds, scaling)


def _variable_length(q: Tensor, k: Tensor, v: Tensor, bounds: RowBounds, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = bounds.layout.frame.longest
    plain = scaling is None or abs(scaling * q.shape[-1] ** 0.5 - 1) < 1e-6
    kernel = varlen_attn if plain else partial(varlen_attn, scale=scaling)
    assert bounds.cumulative is not None
    out = kernel(q, k, v, bounds.cumulative, bounds.cumulative, longest, longest)
    assert isinstance(out, Tensor)
    return out


def _portable(q: Tensor, k: Tensor, v: Tensor, bounds: RowBounds, scaling: float | None) -> Tensor:
    runs = bounds.layout.frame.runs
    sizes = [run.stop - run.start for run in runs]
    whole = q, k, v
    of_runs = [whole] if len(runs) == 1 else zip(*(x.split(sizes) for x in whole), strict=True)
    parts = []
    for run, mask, own in zip(runs, bounds.key_masks, of_runs, strict=True):
        shape = run.num_rows, run.length, *q.shape[1:]
        query, key, value = (x.view(shape).transpose(1, 2) for x in own)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        parts.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
