from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from flatout.multiplex.decode.fused import Fused, why_not
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.steppers import Portable
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import read_decoder
from tests.support.kernels import DEVICE, needs_device
from tests.support.multiplex import FUSIBLE, SIZES, fusible_model, integer_factors, prompts_of, tiny_model


def tokens(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    factors: Mapping[str, Factors],
    fused: bool,
    sampling: Sampling | None = None,
    tile: int = 1,
    slots: int = 2,
) -> list[tuple[int, ...]]:
    """What the slots make of the requests; `fused` puts the hand-written step in the portable one's place."""
    sampling = sampling or Sampling()
    generator = Generator(
        decoder, slots=slots, max_tokens=30, factors=factors, sampling=sampling, mode="eager", tile=tile
    )
    if fused:
        portable = generator.stepper
        assert isinstance(portable, Portable)
        generator.stepper = Fused(
            decoder,
            generator.state,
            factors=factors,
            vectors={},
            sampling=sampling,
            tile=tile,
            portable=portable,
        )
    return [one.tokens for one in generator.generate(requests, max_new_tokens=3)]


def requests_of(lengths: Sequence[int], *, shared: int = 0) -> list[Request]:
    """Antithetic pairs, one variant after the other."""
    return [
        Request(prompt=prompt, variant=row // 2, sign=1 - row % 2 * 2, key=row, shared=shared)
        for row, prompt in enumerate(prompts_of(lengths))
    ]


@pytest.mark.parametrize(
    ("sampling", "tile"), [(Sampling(), 2), (Sampling(temperature=1.0, seed=3), 1)], ids=["greedy", "drawn"]
)
@needs_device
@torch.no_grad()
def test_it_gives_the_tokens_of_the_portable_step(sampling: Sampling, tile: int) -> None:
    decoder = read_decoder(fusible_model().to(DEVICE))
    factors = integer_factors(decoder, num_variants=2, rank=1)
    requests = requests_of([4, 2, 1, 3])
    found = [
        tokens(decoder, requests, factors=factors, fused=fused, sampling=sampling, tile=tile)
        for fused in (True, False)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) > 2


@needs_device
@torch.no_grad()
def test_the_rows_of_a_prefill_are_no_tiles() -> None:
    """Prompts of one token need no prefill: what is left of two tiles is a batch of different variants."""
    decoder = read_decoder(fusible_model().to(DEVICE))
    factors = integer_factors(decoder, num_variants=2, rank=1)
    requests = requests_of([1, 2, 2, 1])
    found = [
        tokens(decoder, requests, factors=factors, fused=fused, tile=2, slots=4) for fused in (True, False)
    ]
    assert found[0] == found[1]


@needs_device
@torch.no_grad()
def test_prompts_begin_in_the_middle_and_pass_a_window() -> None:
    """What the kernels do not prefill, the portable step does; the steps after it are the kernels' own."""
    windowed = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    decoder = read_decoder(fusible_model("qwen2", **windowed).to(DEVICE))
    assert {block.attention.window for block in decoder.blocks} == {5}
    factors = integer_factors(decoder, num_variants=1, rank=1)
    for requests in (requests_of([9, 4]), requests_of([6, 4], shared=2)):
        assert tokens(decoder, requests, factors=factors, fused=True) == tokens(
            decoder, requests, factors=factors, fused=False
        )


@pytest.mark.parametrize("family", FUSIBLE)
def test_it_runs_the_families_of_its_shape(family: str) -> None:
    decoder = read_decoder(fusible_model(family))
    assert why_not(decoder, {}) is None
    assert why_not(decoder, integer_factors(decoder, num_variants=1, rank=2)) is None


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {}, "heads of width 12"),
        ("llama-biased", SIZES, "biases outside"),
        ("gpt2", {"n_embd": 128}, "layer norms"),
        ("gpt-neox", {"hidden_size": 128}, "parallel residual branches"),
        ("gpt-neox-serial", {"hidden_size": 128}, "interleaved by head"),
        ("gemma", SIZES, "stored with an offset"),
        ("gemma2", SIZES, "capped logits"),
        ("gemma3", SIZES, "stored with an offset"),
    ],
)
def test_what_it_cannot_run_is_named(family: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_not(read_decoder(tiny_model(family, **changes)), {}) or "")


def test_factors_it_cannot_read_are_named() -> None:
    decoder = read_decoder(fusible_model())
    factors = integer_factors(decoder, num_variants=2, rank=2)
    name = next(iter(factors))
    some = {other: one for other, one in factors.items() if other != name}
    assert why_not(decoder, some) == "factors for a part of the products"
    first = factors[name]
    mixed = {**factors, name: Factors(first.shrink[:, :1], first.expand[:, :1], 1.0)}
    assert why_not(decoder, mixed) == "factors of different ranks"
    gaps = Factors(first.shrink.mT.contiguous().mT, first.expand, 1.0)
    assert why_not(decoder, {**factors, name: gaps}) == "factors with gaps between their numbers"
    assert why_not(read_decoder(fusible_model().double()), {}) == "weights of type torch.float64"


def test_vectors_it_cannot_read_are_named() -> None:
    decoder = read_decoder(fusible_model())
    assert why_not(decoder, {}, {0: torch.zeros(3, 64)}) is None
    assert why_not(decoder, {}, {0: torch.zeros(64, 3).T}) == "vectors with gaps between their numbers"
