from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flatout.multiplex.factors import Factors
from flatout.multiplex.families import read_decoder
from flatout.multiplex.rows import Rows
from tests.fusible_models import FAMILIES, SIZES, fusible_model, integer_factors, largest_error
from tests.kernels import DEVICE, needs_device
from tests.materialised import logits_of
from tests.tiny_models import tiny_model

PAIRS = Rows((0, 0, 1, 1, None, None), (1, -1, -1, -1, 1, 1))


@needs_device
@pytest.mark.parametrize(
    ("family", "rank", "tile"),
    [("llama", 0, 1), ("llama", 1, 2), ("qwen2", 3, 1), ("qwen3", 4, 2)],
)
@torch.no_grad()
def test_every_row_is_its_materialised_weights(family: str, rank: int, tile: int) -> None:
    """With a tile of 2, rows of one program share their factors and have each their own sign."""
    decoder = read_decoder(fusible_model(family).to(DEVICE))
    factors = integer_factors(decoder, num_variants=2, rank=rank) if rank else {}
    rows = PAIRS if rank else Rows.plain(3)
    assert largest_error(decoder, factors, rows, tile=tile) < 1e-4


@pytest.mark.parametrize("rank", [1, 3, 4])
@torch.no_grad()
def test_variants_and_signs_are_far_apart(rank: int) -> None:
    """Further than the tolerance above, so that a row that runs another one's weights is seen."""
    decoder = read_decoder(fusible_model())
    factors = integer_factors(decoder, num_variants=2, rank=rank)
    ids = torch.tensor([5, 17, 40])
    found = [
        logits_of(decoder, ids, factors, variant, sign)
        for variant, sign in ((0, 1), (0, -1), (1, 1), (None, 1))
    ]
    for one, other in itertools.combinations(found, 2):
        assert float((one - other).norm() / one.norm()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_it_runs_the_families_of_its_shape(family: str) -> None:
    from flatout.multiplex.kernels.step import why_not

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
    from flatout.multiplex.kernels.step import why_not

    assert reason in (why_not(read_decoder(tiny_model(family, **changes)), {}) or "")


def test_factors_it_cannot_read_are_named() -> None:
    from flatout.multiplex.kernels.step import why_not

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


def test_rows_of_a_program_run_one_variant() -> None:
    from flatout.multiplex.kernels.step import tiles_for

    for rank in (0, 1, 4):
        alone, paired = tiles_for(rank, 1), tiles_for(rank, 2)
        assert alone.norm_rows == alone.gate_rows == 1
        assert {paired.norm_rows, paired.gate_rows} <= {1, 2}
