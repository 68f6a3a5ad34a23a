"""The hand-written decode step on a GPU: every row its own weights, and the tokens of the portable step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.generator import Generator
from flatout.multiplex.decode.requests import Request
from flatout.multiplex.decode.sampling import Sampling
from flatout.multiplex.decode.steppers import Mode
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.rows import Rows
from tests.support.multiplex import (
    FUSIBLE,
    fusible_model,
    integer_factors,
    largest_error,
    prompts_of,
    tiny_model,
)

pytestmark = pytest.mark.gpu

# Variants, both signs, plain rows; neighbours share a variant, so that a tile of 2 may hold them.
ROWS = Rows((0, 0, 3, 3, None, None, 2, 2, 1, 1), (1, -1, 1, 1, 1, 1, -1, -1, -1, 1))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LENGTHS = (5, 9, 14, 3, 8, 8, 1, 2, 70, 40)


@pytest.mark.parametrize("family", FUSIBLE)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rank", "tile"), [(0, 1), (1, 1), (1, 2), (3, 2), (4, 1), (4, 2), (8, 2), (16, 1), (16, 2)]
)
@torch.no_grad()
def test_every_row_is_its_materialised_weights(family: str, dtype: torch.dtype, rank: int, tile: int) -> None:
    decoder = read_decoder(fusible_model(family).to(device="cuda", dtype=dtype))
    factors = integer_factors(decoder, num_variants=4, rank=rank) if rank else {}
    rows = ROWS if rank else Rows.plain(len(ROWS))
    assert largest_error(decoder, factors, rows, tile=tile, num_steps=8) <= TOLERANCE[dtype]


def tokens(
    decoder: Decoder, mode: Mode, *, rank: int = 1, slots: int = 4, shared: int = 0, **options: Any
) -> list[tuple[int, ...]]:
    """Antithetic pairs of variants through fewer slots than requests."""
    factors = integer_factors(decoder, num_variants=5, rank=rank) if rank else {}
    requests = [
        Request(
            prompt=prompt,
            variant=row // 2 if rank else None,
            sign=1 - row % 2 * 2,
            key=row,
            shared=min(shared, len(prompt) - 1),
        )
        for row, prompt in enumerate(prompts_of(LENGTHS))
    ]
    generator = Generator(decoder, slots=slots, max_tokens=120, factors=factors, mode=mode, **options)
    assert generator.decision.value == mode
    once, again = ([one.tokens for one in generator.generate(requests, max_new_tokens=30)] for _ in range(2))
    assert once == again
    return once


@pytest.mark.parametrize("family", FUSIBLE)
@pytest.mark.parametrize(("rank", "tile"), [(0, 1), (1, 1), (1, 2), (4, 2)])
def test_tokens_are_those_of_the_portable_step(family: str, rank: int, tile: int) -> None:
    decoder = read_decoder(fusible_model(family).cuda())
    wanted = tokens(decoder, "eager", rank=rank)
    assert tokens(decoder, "fused", rank=rank, tile=tile) == wanted
    assert len(set(wanted)) == len(wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": Sampling(temperature=1.0, seed=4)},
        {"sampling": Sampling(temperature=1.0, top_k=20, top_p=0.9)},
        {"eos": [3, 7, 11, 20, 50]},
        {"stop": [(5, 5), (9,)]},
        {"shared": 4},
    ],
    ids=["drawn", "restricted", "ends", "stops", "prefixes"],
)
def test_options_change_nothing_between_the_steps(options: dict[str, Any]) -> None:
    decoder = read_decoder(fusible_model().cuda())
    assert tokens(decoder, "fused", tile=2, **options) == tokens(decoder, "eager", **options)


@pytest.mark.parametrize("shared", [0, 4])
def test_what_lies_in_the_cache_from_before_does_not_matter(shared: int) -> None:
    """A step loads nothing beyond its row: slots are cleared only for prompts that go on from a prefix."""
    decoder = read_decoder(fusible_model().cuda())
    generator = Generator(decoder, slots=4, max_tokens=120, mode="fused")
    requests = [
        Request(prompt=prompt, key=row, shared=min(shared, len(prompt) - 1))
        for row, prompt in enumerate(prompts_of(LENGTHS))
    ]
    clean = [one.tokens for one in generator.generate(requests, max_new_tokens=30)]
    generator.state.cache.storage.fill_(torch.nan)
    assert [one.tokens for one in generator.generate(requests, max_new_tokens=30)] == clean


def test_a_window_is_kept_by_prompts_and_steps() -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    decoder = read_decoder(fusible_model("qwen2", **windowed).cuda())
    assert tokens(decoder, "fused") == tokens(decoder, "eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=4)])
@pytest.mark.parametrize("mode", ["compiled", "graph"])
def test_compiled_and_captured_steps_give_the_tokens_of_eager_ones(sampling: Sampling, mode: Mode) -> None:
    decoder = read_decoder(fusible_model().cuda())
    assert tokens(decoder, mode, sampling=sampling) == tokens(decoder, "eager", sampling=sampling)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("mode", ["compiled", "graph", "fused"])
@pytest.mark.parametrize("family", FUSIBLE)
def test_every_step_leaves_the_keys_of_the_eager_one_in_bfloat16(family: str, mode: Mode, rank: int) -> None:
    """Two models of different sizes in one process; tokens may differ by rounding, keys and values hardly."""
    for changes in ({}, {"intermediate_size": 96}):
        decoder = read_decoder(fusible_model(family, **changes).to("cuda", torch.bfloat16))
        factors = integer_factors(decoder, num_variants=3, rank=rank) if rank else {}
        prompts = prompts_of([5, 70, 9])
        requests = [Request(prompt=p, variant=row if rank else None) for row, p in enumerate(prompts)]
        kept = []
        for way in ("eager", mode):
            generator = Generator(decoder, slots=3, max_tokens=200, factors=factors, mode=way)
            generator.generate(requests, max_new_tokens=1)
            storage = generator.state.cache.storage.float()
            kept.append(
                torch.cat([storage[:, :, row, :, : len(p)].flatten() for row, p in enumerate(prompts)])
            )
        assert kept[0].norm() > 0
        assert (kept[1] - kept[0]).norm() < 0.02 * kept[0].norm()
        generator.generate(requests, max_new_tokens=120)  # through every bucket


def test_the_choice_falls_on_the_hand_written_step_where_it_runs() -> None:
    chosen = Generator(fusible_model().cuda(), slots=1, max_tokens=20).decision
    assert chosen.value == "fused"
    refused = tiny_model("gpt2").cuda()
    chosen = Generator(refused, slots=1, max_tokens=20).decision
    assert chosen.value == "graph" and "heads of width 12" in chosen.reason
    with pytest.raises(BadInput, match="'fused' cannot run this model: heads of width 12"):
        Generator(refused, slots=1, max_tokens=20, mode="fused")
    vectors = {0: torch.zeros(64, 1, device="cuda").T}
    chosen = Generator(fusible_model().cuda(), slots=1, max_tokens=20, vectors=vectors).decision
    assert chosen.value == "fused"


def test_vectors_at_layers_give_the_tokens_of_the_portable_step() -> None:
    """Rows of several vectors, of both signs and of none, with and without low-rank factors beside them."""
    decoder = read_decoder(fusible_model().cuda())
    drawn = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2)).cuda()
    vectors = {layer: drawn[place] for place, layer in enumerate((0, len(decoder.blocks) - 1))}
    assert steered_tokens(decoder, "fused", vectors) == steered_tokens(decoder, "eager", vectors)
    factors = integer_factors(decoder, num_variants=3, rank=1)
    both = steered_tokens(decoder, "eager", vectors, factors=factors)
    assert steered_tokens(decoder, "fused", vectors, factors=factors) == both
    assert both != steered_tokens(decoder, "eager", vectors)
    assert both != steered_tokens(decoder, "eager", None, factors=factors)


def steered_tokens(
    decoder: Decoder, mode: Mode, vectors: dict[int, torch.Tensor] | None, **options: Any
) -> list[tuple[int, ...]]:
    requests = [
        Request(prompt=prompt, variant=None if row % 4 == 3 else row % 4, sign=1 - row % 2 * 2, key=row)
        for row, prompt in enumerate(prompts_of(LENGTHS))
    ]
    generator = Generator(decoder, slots=4, max_tokens=120, vectors=vectors, mode=mode, **options)
    return [one.tokens for one in generator.generate(requests, max_new_tokens=30)]


def test_redrawn_factors_reach_a_captured_step() -> None:
    decoder = read_decoder(fusible_model().cuda())
    factors, others = (integer_factors(decoder, num_variants=1, rank=rank) for rank in (1, 1))
    for one in others.values():
        one.expand.neg_()
    request = Request(prompt=prompts_of([12])[0], variant=0)

    def first(generator: Generator) -> Sequence[int]:
        return generator.generate([request], max_new_tokens=20)[0].tokens

    generator = Generator(decoder, slots=1, max_tokens=40, factors=factors, mode="fused")
    before = first(generator)
    for name, one in factors.items():
        one.expand.copy_(others[name].expand)
    after = first(generator)
    assert after == first(Generator(decoder, slots=1, max_tokens=40, factors=others, mode="eager")) != before
