from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache
from flatout.multiplex.factors import Factors
from flatout.multiplex.models.decoder import Decoder, Projection
from flatout.multiplex.models.families import read_decoder
from flatout.multiplex.noise.draws import draw_factors
from flatout.multiplex.rows import Rows
from tests.support.multiplex import FAMILIES, prompts_of, random_factors, shared_model, tiny_model

TOKENS = torch.tensor(prompts_of([24] * 3))


def hidden(
    decoder: Decoder,
    tokens: Tensor,
    *,
    factors: dict[str, Factors] | None = None,
    vectors: dict[int, Tensor] | None = None,
    rows: Rows,
) -> Tensor:
    """All tokens in one fresh batch."""
    n, num_tokens = tokens.shape
    return forward.run_blocks(
        decoder,
        forward.embed(decoder, tokens, torch.arange(num_tokens)[None]),
        Cache.empty(decoder, slots=n, max_tokens=num_tokens),
        forward.fresh_places(decoder, slots=torch.arange(n), num_tokens=num_tokens),
        rows.tables(),
        forward.deltas_of(decoder, factors or {}, vectors),
    )


def integers(decoder: Decoder, *, rank: int) -> dict[str, Factors]:
    """What a population of three runs with, large enough to change what a block gives."""
    return {
        name: draw_factors(
            name,
            out_width=one.weight.shape[0],
            in_width=one.weight.shape[1],
            seed=0,
            epoch=0,
            pairs=range(3),
            rank=rank,
            sigma=0.05,
        )
        for name, one in decoder.projections().items()
    }


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_bfloat16_model_stays_near_its_float32_copy(family: str, rank: int) -> None:
    """Fresh and cached batches, plain and with factors and float32 vectors: nothing widens on the way."""
    model = tiny_model(family).to(torch.bfloat16)
    narrow = read_decoder(model)
    wide = read_decoder(copy.deepcopy(model).float())
    rows = Rows((0, None, 2), (1, 1, -1)) if rank else Rows.plain(3)
    factors = integers(narrow, rank=rank) if rank else {}
    vectors = {0: torch.ones(3, narrow.width)} if rank else {}
    wanted = hidden(wide, TOKENS, factors=factors, vectors=vectors, rows=rows)
    cache = Cache.empty(narrow, slots=3, max_tokens=24)
    tables, deltas = rows.tables(), forward.deltas_of(narrow, factors, vectors)
    for start, stop in ((0, 20), (20, 23), (23, 24)):
        positions = torch.arange(start, stop)[None].expand(3, -1)
        if start == 0:
            places = forward.fresh_places(narrow, slots=torch.arange(3), num_tokens=stop)
        else:
            places = forward.cached_places(narrow, positions, slots=None, write=positions, bucket=64)
        x = forward.embed(narrow, TOKENS[:, start:stop], positions)
        found = forward.run_blocks(narrow, x, cache, places, tables, deltas)
        assert found.dtype == cache.storage.dtype == torch.bfloat16
        error = (found - wanted[:, start:stop]).norm() / wanted[:, start:stop].norm()
        assert error < 0.05, (start, error)
    assert forward.logits_of(narrow, found[:, 0]).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_cache_changes_nothing(family: str) -> None:
    """A prefix in one batch, a middle part in a second, then single steps = everything at once."""
    decoder = read_decoder(shared_model(family))
    rows = Rows((0, None, 1), (1, 1, -1))
    factors = random_factors(decoder, num_variants=2)
    wanted = hidden(decoder, TOKENS, factors=factors, rows=rows)
    cache = Cache.empty(decoder, slots=5, max_tokens=30)
    slots, tables, deltas = torch.tensor([4, 0, 2]), rows.tables(), forward.deltas_of(decoder, factors)
    parts = []
    for start, stop in ((0, 9), (9, 20), *((at, at + 1) for at in range(20, 24))):
        positions = torch.arange(start, stop)[None].expand(3, -1)
        if start == 0:
            places = forward.fresh_places(decoder, slots=slots, num_tokens=stop)
        else:
            places = forward.cached_places(decoder, positions, slots=slots, write=positions, bucket=64)
        x = forward.embed(decoder, TOKENS[:, start:stop], positions)
        parts.append(forward.run_blocks(decoder, x, cache, places, tables, deltas))
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_at_different_positions_share_a_batch() -> None:
    decoder = read_decoder(shared_model())
    rows = Rows.plain(3)
    wanted = hidden(decoder, TOKENS, rows=rows)
    cache = Cache.empty(decoder, slots=3, max_tokens=24)
    deltas, ends = forward.deltas_of(decoder, {}), torch.tensor([[4], [11], [23]])
    places = forward.fresh_places(decoder, slots=torch.arange(3), num_tokens=24)
    x = forward.embed(decoder, TOKENS, torch.arange(24)[None])
    forward.run_blocks(decoder, x, cache, places, rows.tables(), deltas)
    for row, end in enumerate(ends[:, 0].tolist()):  # what lies beyond a row must not matter
        cache.storage[:, :, row, :, end:] = 1e3
    places = forward.cached_places(decoder, ends, slots=None, write=ends, bucket=64)
    x = forward.embed(decoder, TOKENS.gather(1, ends), ends)
    x = forward.run_blocks(decoder, x, cache, places, rows.tables(), deltas)
    torch.testing.assert_close(x[:, 0], wanted[torch.arange(3), ends[:, 0]], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_never_changes_a_row() -> None:
    decoder = read_decoder(shared_model("gemma3"))
    short = hidden(decoder, TOKENS[:1, :10], rows=Rows.plain(1))
    padded = hidden(decoder, TOKENS, rows=Rows.plain(3))
    torch.testing.assert_close(padded[:1, :10], short, rtol=1e-4, atol=1e-5)


def plain_product(out_width: int, in_width: int, *, dtype: torch.dtype) -> Projection:
    weight = torch.randn(out_width, in_width, dtype=dtype)
    return Projection(
        name="w", weight=weight, bias=torch.randn(out_width, dtype=dtype), parts=(("w", out_width),)
    )


def materialised(projection: Projection, x: Tensor, rows: Rows, factors: Factors) -> Tensor:
    out = []
    for row, (variant, sign) in enumerate(zip(rows.variants, rows.signs or (1,) * len(rows), strict=True)):
        weight = projection.weight.double()
        if variant is not None:
            weight = weight + factors.delta(variant, sign=sign).double()
        bias = None if projection.bias is None else projection.bias.double()
        out.append(torch.nn.functional.linear(x[row].double(), weight, bias))
    return torch.stack(out)


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.sampled_from([1, -1])), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
def test_every_row_runs_its_own_weights(
    choices: list[tuple[int | None, int]], rank: int, num_tokens: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = Rows(tuple(variant for variant, _ in choices), tuple(sign for _, sign in choices))
    projection = plain_product(12, 8, dtype=torch.float32)
    factors = Factors((torch.randn(4, rank, 8) * 20).to(kind), (torch.randn(4, rank, 12) * 20).to(kind), 1e-3)
    x = torch.randn(len(rows), num_tokens, 8)
    (found,) = forward.product(projection, x, rows.tables(), factors, forward.Deltas())
    torch.testing.assert_close(
        found.double(), materialised(projection, x, rows, factors), rtol=1e-4, atol=1e-4
    )


@given(st.integers(1, 5), st.integers(1, 4))
def test_groups_are_recognised(num: int, size: int) -> None:
    assert forward.group_of(Rows.grouped(num, size=size).tables().index) == size
    mixed = (*(row // size for row in range(num * size)), 0)
    assert forward.group_of(Rows(mixed).tables().index) == (len(mixed) if num == 1 else None)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_grouped_rows_run_their_own_weights(num: int, half: int, rank: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    rows = Rows.grouped(num, size=2 * half, antithetic=True)
    projection = plain_product(12, 8, dtype=torch.float32)
    factors = Factors(torch.randn(6, rank, 8), torch.randn(6, rank, 12), 0.1)
    x = torch.randn(len(rows), num_tokens, 8)
    (found,) = forward.product(projection, x, rows.tables(), factors, forward.Deltas(group=2 * half))
    torch.testing.assert_close(
        found.double(), materialised(projection, x, rows, factors), rtol=1e-4, atol=1e-4
    )


def test_the_compiled_form_of_the_product_is_the_same() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    rows = Rows((0, None, 3, 0), (1, 1, -1, -1))
    projection = plain_product(12, 8, dtype=torch.float32)
    factors = Factors(torch.randn(4, 2, 8), torch.randn(4, 2, 12), 0.1)
    x = torch.randn(4, 1, 8)
    compiled = torch.compile(forward.product, backend="eager", fullgraph=True)
    (found,) = compiled(projection, x, rows.tables(), factors, forward.Deltas())
    torch.testing.assert_close(
        found.double(), materialised(projection, x, rows, factors), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_what_is_written_for_a_compiler_is_the_same_in_any_parts(num_tokens: int) -> None:
    torch.manual_seed(0)
    rows = Rows((0, None, 3, 0), (1, 1, -1, -1))
    projection = plain_product(12, 8, dtype=torch.float32)
    factors = Factors(torch.randn(4, 2, 8), torch.randn(4, 2, 12), 0.1)
    x = torch.randn(4, num_tokens, 8)
    deltas = forward.Deltas(corrected=forward.corrected)
    found = forward.product(projection, x, rows.tables(), factors, deltas, parts=2)
    assert [part.shape[-1] for part in found] == [6, 6]
    torch.testing.assert_close(
        torch.cat(found, dim=-1).double(), materialised(projection, x, rows, factors), rtol=1e-5, atol=1e-5
    )


def test_an_unperturbed_row_is_exactly_plain() -> None:
    projection = plain_product(12, 8, dtype=torch.bfloat16)
    factors = Factors(torch.randn(2, 2, 8), torch.randn(2, 2, 12), 0.1)
    x = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    (found,) = forward.product(projection, x, Rows((None, 1, None)).tables(), factors, forward.Deltas())
    plain = torch.nn.functional.linear(x, projection.weight, projection.bias)
    assert torch.equal(found[[0, 2]], plain[[0, 2]])
    assert not torch.equal(found[1], plain[1])
