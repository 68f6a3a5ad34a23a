"""The hand-written step as a `Stepper`, and which models it can run.

Prefills that start in the middle of a prompt, leave the variants out, or pass a sliding window are rare: the
portable stepper runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatout.multiplex.decode.sampling import Sampling, pick
from flatout.multiplex.decode.steppers import Portable, PromptPart, SlotState, batches, pad_prompts
from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.models.decoder import Decoder, DecoderBlock


class Fused:
    """Greedy choice and the end of a row are kernels; sampling goes the portable way from the logits on."""

    reads_beyond = False

    def __init__(
        self,
        decoder: Decoder,
        state: SlotState,
        *,
        factors: Mapping[str, Factors],
        vectors: Mapping[int, Tensor],
        sampling: Sampling,
        tile: int,
        portable: Portable,
    ) -> None:
        from flatout.multiplex.kernels.step import DecodeStep

        self._step = DecodeStep(decoder, state, factors=factors, vectors=vectors, tile=tile)
        self._sampling = sampling
        self._portable = portable
        windows = [block.attention.window for block in decoder.blocks]
        self._longest_prompt = min(
            window for window in (*windows, decoder.max_positions) if window is not None
        )

    def prefill(self, state: SlotState, parts: Sequence[PromptPart], *, plain: bool = False) -> None:
        """Put the keys and values of `parts` into their slots."""
        if plain or any(part.start or len(part.tokens) > self._longest_prompt for part in parts):
            self._portable.prefill(state, parts, plain=plain)
            return
        for batch in batches(parts):
            slots, tokens = pad_prompts(batch, state.token.device)
            self._step.prefill(tokens, slots)

    def step(self, state: SlotState, *, bucket: int) -> None:
        """Read `token` of every slot, choose the next, append it; attention reads no further than its row."""
        logits = self._step.decode(state.token, state.position)
        if self._sampling.temperature == 0:
            self._step.best(logits)
            self._step.append()
        else:
            chosen = pick(logits, self._sampling, keys=state.key, positions=state.position + 1)
            state.advance(chosen)


def why_not_here(decoder: Decoder) -> str | None:
    """Say why the hand-written step cannot run on this device; None if it can."""
    if decoder.device.type != "cuda":
        return f"the model is on {decoder.device}"
    if torch.cuda.get_device_capability(decoder.device) < (8, 0) or torch.version.hip is not None:
        return "it is written for NVIDIA GPUs from Ampere on"
    return None if HAS_TRITON else "triton is not installed"


def why_not(
    decoder: Decoder, factors: Mapping[str, Factors], vectors: Mapping[int, Tensor] | None = None
) -> str | None:
    """Say why the hand-written step cannot run this model; None if it can."""
    if len({one.rank for one in factors.values()}) > 1:
        return "factors of different ranks"
    if factors and factors.keys() != decoder.projections().keys():
        return "factors for a part of the products"
    if not all(one.shrink.is_contiguous() and one.expand.is_contiguous() for one in factors.values()):
        return "factors with gaps between their numbers"
    if not all(one.is_contiguous() for one in (vectors or {}).values()):
        return "vectors with gaps between their numbers"
    if decoder.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights of type {decoder.dtype}"
    if decoder.head.bias is not None or decoder.softcap is not None:
        return "a head with a bias or capped logits"
    width = decoder.blocks[0].attention.head_width
    if width & (width - 1) or width < 32:
        return f"heads of width {width}: a power of two of at least 32 is needed"
    for block in decoder.blocks:
        reason = _block_obstacle(block)
        if reason is not None:
            return reason
    if decoder.positions is not None or decoder.norm.centred or decoder.norm.offset:
        return "learned positions, or a last norm that is not a plain RMS norm"
    return None


def _block_obstacle(block: DecoderBlock) -> str | None:
    attention, mlp = block.attention, block.mlp
    norms = (block.attention_norm, block.mlp_norm)
    every_norm = [norm for norm in (*norms, attention.q_norm, attention.k_norm) if norm is not None]
    checks = {
        "parallel residual branches": block.parallel,
        "queries, keys and values interleaved by head": attention.interleaved,
        "norms whose weights are stored with an offset": any(norm.offset for norm in every_norm),
        "layer norms": any(norm.centred or norm.bias is not None for norm in norms),
        "norms after a branch": block.attention_out_norm is not None or block.mlp_out_norm is not None,
        "capped scores": attention.softcap is not None,
        "rotation of a part of each head": attention.rotary_width != attention.head_width,
        "an MLP without a gate": not mlp.gated,
        f"activation {mlp.activation}": mlp.activation not in ("silu", "gelu_tanh"),
        "biases outside of query, key and value": any(
            product.bias is not None for product in (attention.out, mlp.up, mlp.down)
        ),
    }
    return next((name for name, found in checks.items() if found), None)
