from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.multiplex.factors import Factors
from flatout.multiplex.kernels.obstacles import why_not
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import FUSIBLE, SIZES, fusible_model, integer_factors, tiny_model


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
