from __future__ import annotations

import itertools

import pytest
import torch

from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.rows import Rows
from tests.support.kernels import DEVICE, needs_device
from tests.support.multiplex import fusible_model, integer_factors, largest_error, logits_of

PAIRS = Rows((0, 0, 1, 1, None, None), (1, -1, -1, -1, 1, 1))
SMALL = {  # the interpreter goes through a reduction of several sums number by number
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@needs_device
@pytest.mark.parametrize(
    ("family", "rank", "tile", "sizes"),
    [
        ("llama", 0, 1, {}),
        ("llama", 1, 2, {"num_attention_heads": 2}),
        ("qwen2", 3, 1, SMALL),
        ("qwen3", 4, 2, SMALL),
    ],
    ids=["plain", "rank1", "rank3", "rank4"],
)
@torch.no_grad()
def test_every_row_is_its_materialised_weights(
    family: str, rank: int, tile: int, sizes: dict[str, int]
) -> None:
    """With a tile of 2, rows of one program share their factors and have each their own sign."""
    decoder = read_decoder(fusible_model(family, **sizes).to(DEVICE))
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


def test_rows_of_a_program_run_one_variant() -> None:
    from flatout.multiplex.kernels.step import tiles_for

    for rank in (0, 1, 4):
        alone, paired = tiles_for(rank, 1), tiles_for(rank, 2)
        assert alone.norm_rows == alone.gate_rows == 1
        assert {paired.norm_rows, paired.gate_rows} <= {1, 2}


def test_a_gate_with_few_columns_keeps_short_blocks() -> None:
    """Blocks of 1,024 columns were faster at rank 4 on a wide model; a narrow one would fill them badly."""
    from flatout.multiplex.kernels.step import tiles_for

    assert tiles_for(4, 2, width=1536).gate_block == 1024
    assert tiles_for(4, 2, width=576).gate_block == tiles_for(16, 2, width=1536).gate_block == 256
