"""The hand-written step as a `Stepper`: it runs the slots of a `State` like any other.

Prefills that start in the middle of a prompt, leave the variants out, or pass a sliding window are rare: the
portable stepper runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatout.multiplex.decode.sampling import Sampling, pick
from flatout.multiplex.decode.steppers import Piece, Portable, State, batches
from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels.step import FusedStep
from flatout.multiplex.models.decoder import Decoder


class Fused:
    """Greedy choice and the end of a row are kernels; sampling goes the portable way from the logits on."""

    reads_beyond = False

    def __init__(
        self,
        decoder: Decoder,
        state: State,
        *,
        factors: Mapping[str, Factors],
        vectors: Mapping[int, Tensor],
        sampling: Sampling,
        tile: int,
        portable: Portable,
    ) -> None:
        layers = range(len(decoder.blocks))
        self._step = FusedStep(
            decoder,
            keys=[state.cache.keys(layer) for layer in layers],
            values=[state.cache.values(layer) for layer in layers],
            tables=state.tables,
            factors=factors,
            vectors=vectors,
            tile=tile,
        )
        self._sampling = sampling
        self._portable = portable
        windows = [block.attention.window for block in decoder.blocks]
        self._longest_prompt = min(
            window for window in (*windows, decoder.max_positions) if window is not None
        )

    def prefill(
        self,
        state: State,
        slots: Sequence[int],
        prompts: Sequence[tuple[int, ...]],
        *,
        start: int | Sequence[int] = 0,
        plain: bool = False,
    ) -> None:
        """Put the keys and values of `prompts` into `slots`, from position `start` on."""
        started = start if isinstance(start, int) else any(start)
        if plain or started or any(len(prompt) > self._longest_prompt for prompt in prompts):
            self._portable.prefill(state, slots, prompts, start=start, plain=plain)
            return
        pieces = [Piece(slot, prompt, 0) for slot, prompt in zip(slots, prompts, strict=True) if prompt]
        for batch in batches(pieces):
            longest = max(len(piece.tokens) for piece in batch)
            padded = [[*piece.tokens, *[0] * (longest - len(piece.tokens))] for piece in batch]
            device = state.token.device
            where = torch.tensor([piece.slot for piece in batch], device=device)
            self._step.prefill(torch.tensor(padded, device=device), where)

    def step(self, state: State, *, bucket: int) -> None:
        """Read `token` of every slot, choose the next, append it; attention reads no further than its row."""
        logits = self._step.decode(state.token, state.position)
        if self._sampling.temperature == 0:
            self._step.best(logits)
            self._step.append(state)
        else:
            chosen = pick(logits, self._sampling, keys=state.key, positions=state.position + 1)
            state.advance(chosen)
