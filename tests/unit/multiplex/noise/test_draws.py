from __future__ import annotations

import hashlib
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.multiplex.noise import draws
from flatout.multiplex.noise.draws import (
    draw_factors,
    draw_full,
    normals,
    table,
    uniform_key,
    uniforms,
)
from flatout.multiplex.noise.philox import stream_key

CPU = torch.device("cpu")
DTYPES = [torch.int8, torch.bfloat16, torch.float32]


def draw(
    *,
    seed: int = 11,
    epoch: int = 2,
    parameter: str = "layer.weight",
    side: draws.Side = "shrink",
    pairs: range | Tensor = range(4),
    count: int = 1000,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return normals(
        seed=seed,
        epoch=epoch,
        parameter=parameter,
        side=side,
        pairs=pairs,
        count=count,
        first=first,
        dtype=dtype,
    )


def test_the_tables_are_the_same_in_every_version() -> None:
    """A run that is resumed elsewhere, or with another Python, must rebuild the same noise."""
    digests = {
        dtype: hashlib.blake2b(
            table(dtype, CPU).view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for dtype in DTYPES
    }
    assert digests == {
        torch.int8: "4dcd2a486e8ae0e1",
        torch.bfloat16: "cb69cd884924ebdc",
        torch.float32: "7013eb3e874e925f",
    }


def test_the_tables_are_symmetric_quantiles_of_variance_one() -> None:
    quantiles = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    for dtype in (torch.int8, torch.float32):
        values = table(dtype, CPU).double() * draws.unit(dtype)
        assert torch.equal(values, -values.flip(0))
        assert values.square().mean().item() == pytest.approx(1, abs=1e-7)
    assert torch.allclose(table(torch.float32, CPU).double(), quantiles, rtol=1e-4)
    integers = table(torch.int8, CPU).double()
    assert ((integers - quantiles * 32).abs() <= 0.5).sum() == 65536 - 4  # two clamped at each end
    assert integers.abs().max() == 127


def test_the_float_table_has_the_moments_of_a_normal() -> None:
    values = table(torch.float32, CPU).double()
    assert values.pow(4).mean().item() == pytest.approx(3, rel=1e-2)
    assert values.pow(6).mean().item() == pytest.approx(15, rel=5e-2)


def test_there_is_no_table_of_another_type() -> None:
    with pytest.raises(BadInput, match="float16"):
        draw(dtype=torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_has_the_moments_of_its_table(dtype: torch.dtype) -> None:
    drawn = draw(pairs=range(16), count=1 << 16, dtype=dtype).double() * draws.unit(dtype)
    samples = drawn.numel()
    assert abs(drawn.mean().item()) < 4 / math.sqrt(samples)
    assert abs(drawn.square().mean().item() - 1) < 4 * math.sqrt(2 / samples)
    assert abs(drawn.pow(3).mean().item()) < 4 * math.sqrt(15 / samples)


def test_every_entry_of_the_table_is_drawn_equally_often() -> None:
    bits = draw(pairs=range(8), count=1 << 17).view(torch.int32).flatten()
    counts = torch.unique(bits, return_counts=True)[1]
    expected = bits.numel() / 65536
    chi_squared = (counts.double() - expected).square().sum().item() / expected
    assert len(counts) > 65530
    assert abs(chi_squared - 65535) < 5 * math.sqrt(2 * 65535)


def test_streams_do_not_correlate() -> None:
    """Seeds, epochs, parameters, sides, pairs and neighbouring elements: each gives numbers of its own."""
    count = 1 << 16
    streams = [
        draw(count=count),
        draw(count=count, seed=12),
        draw(count=count, epoch=3),
        draw(count=count, parameter="layer.weight2"),
        draw(count=count, side="expand"),
        draw(count=count, side="full"),
        draw(count=count, pairs=range(4, 8)),
        draw(count=count, first=1),
        draw(count=count, first=8),
    ]
    rows = torch.cat(streams).double()
    assert len(rows) == 36
    correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max().item() < 5 / math.sqrt(count)


@given(
    dtype=st.sampled_from(DTYPES),
    first=st.integers(0, 70),
    count=st.integers(0, 70),
    pairs=st.lists(st.integers(0, 19), max_size=6),
)
def test_a_shard_is_a_slice_of_the_whole(
    dtype: torch.dtype, first: int, count: int, pairs: list[int]
) -> None:
    whole = draw(pairs=range(20), count=140, dtype=dtype)
    part = draw(pairs=torch.tensor(pairs, dtype=torch.int64), first=first, count=count, dtype=dtype)
    assert torch.equal(part, whole[pairs, first : first + count])


def test_a_draw_of_many_tiles_is_the_draw_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(pairs=range(7), count=333, first=3)
    for tile in (1, 5, 41, 42, 100):
        monkeypatch.setattr(draws, "TILE", tile)
        assert torch.equal(draw(pairs=range(7), count=333, first=3), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [10, 1 << 20])
def test_whole_operators_give_the_same_bits(
    dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "DEVICE_TILE", tile)
    stream = draws.NoiseStream(key=stream_key(11, "layer.weight", "shrink"), epoch=2)
    drawn = torch.empty(5, 301, dtype=dtype)
    draws.fill_with_torch(drawn, stream=stream, pairs=torch.arange(2, 12, 2), first=6)
    assert torch.equal(drawn, draw(pairs=range(2, 12, 2), count=301, first=6, dtype=dtype))


def test_bfloat16_is_float32_rounded() -> None:
    assert torch.equal(draw(dtype=torch.bfloat16), draw().to(torch.bfloat16))


def test_out_is_filled_and_returned() -> None:
    whole = torch.zeros(4, 30)
    given_ = whole[:, 5:25]
    drawn = normals(
        seed=11, epoch=2, parameter="layer.weight", side="shrink", pairs=range(4), count=20, out=given_
    )
    assert drawn is given_
    assert torch.equal(whole[:, 5:25], draw(count=20))
    assert whole[:, :5].eq(0).all() and whole[:, 25:].eq(0).all()
    with pytest.raises(BadInput, match=r"give torch.int8 \(4, 20\)"):
        normals(
            seed=1,
            epoch=0,
            parameter="w",
            side="full",
            pairs=range(4),
            count=20,
            dtype=torch.int8,
            out=whole[:, :20],
        )


def test_numbers_that_do_not_fit_the_counter_are_refused() -> None:
    with pytest.raises(BadInput, match="epoch"):
        draw(epoch=2**32)
    with pytest.raises(BadInput, match="pairs"):
        draw(pairs=range(-1, 3))
    with pytest.raises(BadInput, match="pairs"):
        draw(pairs=range(2**32, 2**32 + 1))
    with pytest.raises(BadInput, match="35 bits"):
        draw(first=1 << 35)
    assert draw(pairs=range(2**32 - 1, 2**32), first=(1 << 35) - 8, count=8).shape == (1, 8)


def test_uniforms_are_a_function_of_seed_key_and_position() -> None:
    keys, positions = torch.arange(300)[:, None] + 2**40, torch.arange(700)[None, :]
    drawn = uniforms(seed=5, keys=keys, positions=positions)
    assert drawn.shape == (300, 700) and drawn.dtype == torch.float32
    assert drawn.min() >= 0 and drawn.max() < 1
    assert torch.equal(drawn[17, 33:40], uniforms(seed=5, keys=keys[17], positions=positions[0, 33:40]))
    samples = drawn.numel()
    assert abs(drawn.double().mean().item() - 0.5) < 4 / math.sqrt(12 * samples)
    shares = torch.histc(drawn, bins=64, min=0, max=1) / samples
    assert (shares - 1 / 64).abs().max().item() < 5 * math.sqrt(1 / 64 / samples)


def test_uniforms_of_a_key_made_beforehand_are_the_same() -> None:
    keys, positions = torch.arange(9)[:, None], torch.arange(7)[None]
    for seed in (0, 5, 2**64 - 1):
        drawn = uniforms(seed=seed, keys=keys, positions=positions)
        stream = uniform_key(seed)
        assert torch.equal(drawn, uniforms(seed=0, keys=keys, positions=positions, stream=stream))


def test_uniforms_of_other_seeds_and_keys_do_not_correlate() -> None:
    positions = torch.arange(1 << 14)
    rows = [
        uniforms(seed=seed, keys=torch.tensor(key), positions=positions)
        for seed, key in itertools.product((5, 6), (1, 2, 1 + 2**32))
    ]
    correlation = torch.corrcoef(torch.stack(rows)) - torch.eye(6)
    assert correlation.abs().max().item() < 5 / math.sqrt(len(positions))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4])
def test_the_product_of_factors_has_variance_sigma_squared(dtype: torch.dtype, rank: int) -> None:
    factors = draw_factors(
        "w",
        out_width=256,
        in_width=200,
        seed=1,
        epoch=0,
        pairs=range(64),
        rank=rank,
        sigma=0.01,
        dtype=dtype,
    )
    assert factors.shrink.shape == (64, rank, 200) and factors.expand.shape == (64, rank, 256)
    assert factors.shrink.dtype == factors.expand.dtype == dtype
    deltas = torch.stack([factors.delta(variant) for variant in range(64)])
    assert deltas.square().mean().sqrt().item() == pytest.approx(0.01, rel=0.02)


def test_factors_of_some_pairs_are_those_of_the_whole() -> None:
    def some(pairs: range) -> Tensor:
        factors = draw_factors("w", out_width=9, in_width=5, seed=1, epoch=0, pairs=pairs, rank=3, sigma=1.0)
        return torch.cat([factors.shrink, factors.expand], dim=2)

    assert torch.equal(some(range(10))[3:7], some(range(3, 7)))


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(BadInput, match="rank 0 of w"):
        draw_factors("w", out_width=1, in_width=1, seed=1, epoch=0, pairs=range(1), rank=0, sigma=1.0)


def test_full_noise_of_a_vector() -> None:
    whole = draw_full("norm.weight", width=4096, seed=3, epoch=1, pairs=range(8), sigma=0.5, dtype=torch.int8)
    assert whole.values.shape == (8, 4096)
    assert (whole.values * whole.scale).square().mean().sqrt().item() == pytest.approx(0.5, rel=0.02)
    part = draw_full("norm.weight", width=4096, seed=3, epoch=1, pairs=range(2, 4), sigma=0.5)
    assert part.scale == 0.5
    assert torch.equal(part.values, draw_full_floats()[2:4])


def draw_full_floats() -> Tensor:
    return draw_full("norm.weight", width=4096, seed=3, epoch=1, pairs=range(8), sigma=0.5).values


def test_factors_are_refilled_as_they_are_drawn() -> None:
    shapes = {"a": (6, 4), "b": (3, 9)}

    def drawn(epoch: int, pairs: range) -> dict[str, draws.Factors]:
        return {
            name: draws.draw_factors(
                name, out_width=out, in_width=into, seed=5, epoch=epoch, pairs=pairs, rank=2, sigma=0.1
            )
            for name, (out, into) in shapes.items()
        }

    kept, last = drawn(0, range(4)), drawn(0, range(4))
    draws.Refill(kept, seed=5)(epoch=7, pairs=range(10, 13))
    for name, fresh in drawn(7, range(10, 13)).items():
        assert kept[name].shrink[:3].equal(fresh.shrink) and kept[name].expand[:3].equal(fresh.expand)
        assert kept[name].shrink[3:].equal(last[name].shrink[3:])
