"""T5: an encoder and a decoder with cross-attention and relative position biases.  Held out.

The table was measured with transformers 5.17, which hands the bias to PyTorch as it lies, with heads
innermost; PyTorch's fused kernels do not read that, and attention is computed plainly.  Later versions copy
the bias into rows first, which is another program with other memory.  What is estimated here is the measured
one, whatever version is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, own_loss, padding_mask, token_ids

SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
}


def _t5(shape: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.integrations import sdpa_attention

    sdpa_attention.create_position_bias_mask = _bias_as_it_lies
    config = T5Config(**SHAPES[shape], vocab_size=32128, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def _bias_as_it_lies(
    position_bias: Tensor, attention_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> Tensor:
    """What transformers 5.17 adds to the scores."""
    if attention_mask is None and not is_causal:
        return position_bias
    if attention_mask is None:
        rows, columns = (torch.arange(each.shape[2], device=key.device) for each in (query, key))
        attention_mask = (rows[:, None] >= columns[None, :]).view(1, 1, len(rows), len(columns))
    if attention_mask.dtype is torch.bool:
        return torch.where(attention_mask, position_bias, torch.finfo(key.dtype).min)
    return position_bias + attention_mask


def _texts(*, batch_size: int, length: int, target: int) -> dict[str, Tensor]:
    return {
        "input_ids": token_ids(batch_size, length),
        "attention_mask": padding_mask(batch_size, length),
        "labels": token_ids(batch_size, target),
    }


def _subject(shape: str) -> Subject:
    return Subject(
        family="t5", name=f"t5-{shape}", make_model=lambda: _t5(shape), make_batch=_texts, loss=own_loss
    )


def _sizes(length: int, target: int) -> dict[str, int]:
    return {"length": length, "target": target}


CONFIGURATIONS: list[Configuration] = [
    _subject("small").at(32, sizes=_sizes(256, 64), precision="fp32", cap_gib=8),
    _subject("base").at(16, sizes=_sizes(512, 128), precision="bf16", clip_norm=1.0, cap_gib=16),
    _subject("base").at(32, sizes=_sizes(512, 128), precision="bf16", checkpointing=True, accumulation=2),
    _subject("large").at(4, sizes=_sizes(512, 128), precision="tf32", optimizer="sgd-momentum"),
    _subject("small").at(32, sizes=_sizes(512, 64), precision="bf16", mode="generate", new_tokens=48),
]
