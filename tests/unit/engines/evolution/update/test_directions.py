"""One product over the pairs equals the sum that defines the update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.population.weights import Stack
from flatout.engines.evolution.update import directions
from flatout.engines.evolution.update.directions import Coefficients
from flatout.multiplex.factors import Factors
from flatout.multiplex.noise.draws import FullNoise, draw_factors, draw_full

CPU = torch.device("cpu")


def factors(variants: range, *, rank: int, dtype: torch.dtype = torch.int8, parameter: str = "a") -> Factors:
    return draw_factors(
        parameter, out_width=7, in_width=5, seed=1, epoch=2, pairs=variants, rank=rank, sigma=0.3, dtype=dtype
    )


def stack(variants: range, *, rank: int, dtype: torch.dtype = torch.int8) -> Stack:
    """Two matrices of one shape."""
    each = [factors(variants, rank=rank, dtype=dtype, parameter=name) for name in "ab"]
    sides = (torch.stack([getattr(one, side) for one in each]) for side in ("shrink", "expand"))
    return Stack(*sides, tuple(one.scale for one in each))


@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from([torch.int8, torch.float32]))
def test_the_direction_is_the_sum_over_variants(num: int, rank: int, dtype: torch.dtype) -> None:
    coefficients = torch.linspace(-1, 2, num)
    found = directions.direction(lambda block: stack(block, rank=rank, dtype=dtype), coefficients)
    for number, parameter in enumerate("ab"):
        whole = factors(range(num), rank=rank, dtype=dtype, parameter=parameter)
        expected = sum(float(coefficients[v]) * whole.delta(v) for v in range(num))
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-5)


def test_blocks_change_the_direction_by_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    coefficients = torch.linspace(-1, 2, 10)
    whole = directions.direction(lambda block: stack(block, rank=2), coefficients)
    monkeypatch.setattr(directions, "BLOCK", 3)
    assert [len(block) for block in directions.blocks(10)] == [3, 3, 3, 1]
    torch.testing.assert_close(directions.direction(lambda b: stack(b, rank=2), coefficients), whole)


def test_the_direction_of_a_vector_is_the_sum_over_variants() -> None:
    def draw(block: range) -> FullNoise:
        return draw_full("b", width=11, seed=1, epoch=0, pairs=block, sigma=0.5)

    coefficients = torch.tensor([1.0, -2.0, 0.5])
    noise = draw(range(3))
    expected = (coefficients[:, None] * noise.values * noise.scale).sum(0, keepdim=True)
    torch.testing.assert_close(directions.direction(draw, coefficients), expected)


def test_a_direction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one variant"):
        directions.direction(lambda block: stack(block, rank=1), torch.zeros(0))


def test_a_pair_counts_by_its_difference() -> None:
    fitness = torch.tensor([1.0, 0.25, -3.0, 2.0])
    pairs = Coefficients.of_fitness(fitness, antithetic=True, device=CPU)
    assert pairs.host.tolist() == pairs.device.tolist() == [0.75, -5.0]
    assert Coefficients.of_fitness(fitness, antithetic=False, device=CPU).host is fitness


def test_figures_of_an_update() -> None:
    tally = directions.UpdateTally()
    tally.compare(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    tally.compare(torch.tensor([4]), torch.tensor([0]))
    tally.steps += [torch.tensor([9.0, 0.25, 64.0]), torch.tensor([16.0, 0.75, 36.0])]
    found = tally.statistics(torch.tensor([[0.0, torch.nan], [1.0, 2.0]]))
    assert found.direction_norm == 5.0
    assert found.update_norm == 1.0
    assert found.update_share == pytest.approx(0.1)
    assert found.cosine == pytest.approx(3 / (5 * 2**0.5))
    assert (found.reward_mean, found.reward_max, found.reward_failures) == (1.0, 2.0, 1)


def test_what_is_not_known_is_none() -> None:
    found = directions.UpdateTally().statistics(torch.full((2, 2), torch.nan))
    assert (found.cosine, found.update_share, found.reward_mean, found.reward_std) == (None,) * 4
    assert found.reward_failures == 4


def test_gains_times_the_largest_are_the_coefficients() -> None:
    found = Coefficients.of(torch.tensor([0.5, -4.0, 0.0]), device=CPU)
    assert found.gains.abs().max() == 1
    assert (found.gains.float() * found.largest).equal(found.host)
    assert found.gains.dtype == torch.float16  # as the kernel's product takes them
    assert not Coefficients.of(torch.zeros(3), device=CPU).gains.any()
