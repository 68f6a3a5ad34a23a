"""Batched generation: slots that run different variants, refilled from a queue of requests.

A decode step reads every weight once, whatever the number of rows, so throughput is the number of rows that a
step carries.  The slots are those rows.  The host looks at them every few steps, collects what has finished
and gives the free slots to the next requests: their prompts without the last token run as one batch, and the
slot's first step reads the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.cache import Prefixes
from flatout.multiplex.decode.fused import Fused, why_not, why_not_here
from flatout.multiplex.decode.requests import Completion, GenerationProgress, Limits, Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.slot_schedule import Schedule
from flatout.multiplex.decode.steppers import Graphed, Mode, Portable, SlotState, Stepper, choose_mode
from flatout.multiplex.models.families import read_decoder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatout.multiplex.factors import Factors
    from flatout.multiplex.models.decoder import Decoder


class Generator:
    """`slots` texts of at most `max_tokens` tokens at a time, over one model and its variants.

    Variant v changes products by the v-th of their `factors` (by `Projection.name`), and adds the v-th of
    `vectors` [variants, width] (by layer) to what the layer gives, both times the request's sign.  Both may
    be redrawn between calls by writing into their tensors.  After a change of the model's own weights call
    `weights_changed`.

    `eos` are the tokens that end a text, None for those of the model's generation config, and `stop` the
    sequences that do.  Shared prefixes are kept for later requests, in up to a quarter of the cache's bytes
    beside it.  With `tile`, that many neighbouring slots are filled together, by requests of one variant: the
    hand-written step then reads a variant's factors once for several rows.
    """

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        slots: int,
        max_tokens: int,
        factors: Mapping[str, Factors] | None = None,
        vectors: Mapping[int, Tensor] | None = None,
        sampling: Sampling | None = None,
        eos: Sequence[int] | None = None,
        stop: Sequence[Sequence[int]] = (),
        mode: Mode = "auto",
        tile: int = 1,
    ) -> None:
        self.decoder = read_decoder(model)
        factors, vectors = dict(factors or {}), dict(vectors or {})
        _check_factors(self.decoder, factors)
        _check_vectors(self.decoder, vectors)
        positions = self.decoder.max_positions
        if tile < 1 or slots % tile:
            raise BadInput(
                f"{slots} slots cannot be cut into tiles of {tile}", hint="use a multiple of it, or tile=1"
            )
        if slots < 1 or not 2 <= max_tokens <= positions:
            raise BadInput(
                f"slots={slots} or max_tokens={max_tokens} is out of range: the model has {positions}"
                " positions",
                hint=f"give at least 1 slot, and 2 to {positions} tokens",
            )
        self.slots = slots
        self.limits = Limits(
            max_tokens=max_tokens,
            vocabulary=self.decoder.vocabulary,
            num_variants=min(
                (len(held) for held in (*vectors.values(), *(one.shrink for one in factors.values()))),
                default=0,
            ),
        )
        ends = end_tokens(model) if eos is None else eos
        self.state = SlotState.empty(self.decoder, slots=slots, max_tokens=max_tokens, eos=ends)
        self.tile = tile
        self.decision = choose_mode(
            mode,
            device=self.decoder.device,
            obstacle=why_not_here(self.decoder) or why_not(self.decoder, factors, vectors),
        )
        self.stepper = self._stepper(factors, vectors, sampling or Sampling())
        self._stop = tuple(tuple(sequence) for sequence in stop)
        self._prefixes = Prefixes(max_tokens=slots * max_tokens // 4)

    def _stepper(
        self, factors: Mapping[str, Factors], vectors: Mapping[int, Tensor], sampling: Sampling
    ) -> Stepper:
        portable = Portable(
            self.decoder,
            factors=factors,
            vectors=vectors,
            sampling=sampling,
            compiled=self.decision.value in ("compiled", "graph"),
        )
        if self.decision.value == "fused":
            fused = Fused(
                self.decoder,
                self.state,
                factors=factors,
                vectors=vectors,
                sampling=sampling,
                tile=self.tile,
                portable=portable,
            )
            return Graphed(fused, self.state, by_bucket=False)
        return Graphed(portable, self.state) if self.decision.value == "graph" else portable

    def weights_changed(self) -> None:
        """Forget the prefixes that were computed with other weights."""
        self._prefixes.forget()

    @torch.no_grad()
    def generate(
        self,
        requests: Iterable[Request],
        *,
        max_new_tokens: int,
        on_finished: Callable[[Completion], None] | None = None,
        on_progress: Callable[[GenerationProgress], None] | None = None,
    ) -> list[Completion]:
        """Complete every request, in the order of the requests.

        An iterator is drawn from as slots become free, so `on_finished` may decide what it yields next.
        """
        schedule = Schedule(
            requests,
            state=self.state,
            stepper=self.stepper,
            limits=self.limits,
            prefixes=self._prefixes,
            stop=self._stop,
            max_new_tokens=max_new_tokens,
            tile=self.tile,
        )
        while schedule.refill():
            schedule.run()
            for completion in schedule.collect():
                if on_finished is not None:
                    on_finished(completion)
            if on_progress is not None:
                on_progress(schedule.progress())
        return schedule.completions()


def generate(
    model: nn.Module | Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    slots: int = 64,
    sampling: Sampling | None = None,
    eos: Sequence[int] | None = None,
    mode: Mode = "auto",
) -> list[list[int]]:
    """Return the new tokens of every prompt; with sampling, prompt i draws the noise of key i."""
    if not prompts:
        return []
    generator = Generator(
        model,
        slots=min(slots, len(prompts)),
        max_tokens=max(len(prompt) for prompt in prompts) + max_new_tokens,
        sampling=sampling,
        eos=eos,
        mode=mode,
    )
    requests = [Request(prompt=tuple(prompt), key=key) for key, prompt in enumerate(prompts)]
    return [list(one.tokens) for one in generator.generate(requests, max_new_tokens=max_new_tokens)]


def end_tokens(model: nn.Module | Decoder) -> tuple[int, ...]:
    """Return the tokens that end a text by the model's own generation config."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _check_factors(decoder: Decoder, factors: Mapping[str, Factors]) -> None:
    """Raise BadInput unless every set of factors fits the product it is named after."""
    known = decoder.projections()
    for name, one in factors.items():
        if name not in known:
            raise BadInput(
                f"{name!r} is not a product of the model", hint=f"the first is {next(iter(known))!r}"
            )
        wanted = tuple(known[name].weight.shape)
        found = (one.expand.shape[2], one.shrink.shape[2])
        if found != wanted:
            raise BadInput(
                f"the factors of {name} are for {found}", hint=f"its weight is {wanted}: [out, in]"
            )
        if one.shrink.device != decoder.device or one.expand.device != decoder.device:
            raise BadInput(
                f"the factors of {name} are not on {decoder.device}", hint="move them to the model"
            )


def _check_vectors(decoder: Decoder, vectors: Mapping[int, Tensor]) -> None:
    """Raise BadInput unless every table of vectors belongs to a layer and has its width."""
    for layer, one in vectors.items():
        if not 0 <= layer < len(decoder.blocks):
            raise BadInput(
                f"there are vectors for layer {layer}",
                hint=f"the model has layers 0 to {len(decoder.blocks) - 1}",
            )
        if one.ndim != 2 or one.shape[1] != decoder.width or one.device != decoder.device:
            raise BadInput(
                f"the vectors of layer {layer} are {tuple(one.shape)} on {one.device}",
                hint=f"give [variants, {decoder.width}] on {decoder.device}",
            )
