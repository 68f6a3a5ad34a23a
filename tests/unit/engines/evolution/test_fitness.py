"""Fitness belongs to the member that earned it, and to nothing else."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.evolution.fitness import Shaping, centred_rewards, reward_matrix, shape
from flatout.ground.errors import BadInput

SHAPINGS: tuple[Shaping, ...] = get_args(Shaping)
every_shaping = pytest.mark.parametrize("how", SHAPINGS)
values = st.sampled_from([0.0, 1.0, 0.1, 0.5, 0.3, -2.0, 0.7, 12.25])
values_or_failed = st.one_of(values, st.just(math.nan))


@st.composite
def matrices(draw: st.DrawFn, elements: st.SearchStrategy[float] = values_or_failed) -> Tensor:
    """Rewards of an even number of members."""
    num_members, num_prompts = 2 * draw(st.integers(1, 6)), draw(st.integers(1, 5))
    row = st.lists(elements, min_size=num_prompts, max_size=num_prompts)
    rows = draw(st.lists(row, min_size=num_members, max_size=num_members))
    return torch.tensor(rows, dtype=torch.float64)


def close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6)


@every_shaping
@given(rewards=matrices())
def test_finite_and_sums_to_zero(how: Shaping, rewards: Tensor) -> None:
    fitness = shape(rewards, how=how)
    assert fitness.shape == (len(rewards),) and fitness.dtype == torch.float32
    assert torch.isfinite(fitness).all()
    assert fitness.sum().abs() <= 1e-5 * len(rewards)


@every_shaping
@given(rewards=matrices(), shift=st.sampled_from([0.1, -3.0, 100.0]), data=st.data())
def test_what_is_added_to_a_whole_prompt_changes_nothing(
    how: Shaping, rewards: Tensor, shift: float, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, rewards.shape[1] - 1))
    shifted = rewards.clone()
    shifted[:, prompt] += shift
    assert close(shape(shifted, how=how), shape(rewards, how=how))


@every_shaping
@given(rewards=matrices(), scale=st.sampled_from([0.1, 3.0, 1000.0]))
def test_the_unit_of_rewards_does_not_matter(how: Shaping, rewards: Tensor, scale: float) -> None:
    assert close(shape(rewards * scale, how=how), shape(rewards, how=how))


@every_shaping
@given(rewards=matrices(), data=st.data())
def test_members_in_another_order_have_their_fitness_in_that_order(
    how: Shaping, rewards: Tensor, data: st.DataObject
) -> None:
    num_members = len(rewards)
    if how == "sign":  # pairs stay together
        pairs = data.draw(st.permutations(range(num_members // 2)))
        order = [member for pair in pairs for member in (2 * pair, 2 * pair + 1)]
    else:
        order = data.draw(st.permutations(range(num_members)))
    assert close(shape(rewards[order], how=how), shape(rewards, how=how)[order])


@every_shaping
@given(rewards=matrices(), data=st.data())
def test_prompts_in_another_order_change_nothing(how: Shaping, rewards: Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(rewards.shape[1])))
    assert close(shape(rewards[:, order], how=how), shape(rewards, how=how))


@every_shaping
@given(value=values, num_pairs=st.integers(1, 700), num_prompts=st.integers(1, 9))
def test_constant_rewards_say_nothing(how: Shaping, value: float, num_pairs: int, num_prompts: int) -> None:
    for dtype in (torch.float64, torch.float32):
        rewards = torch.full((2 * num_pairs, num_prompts), value, dtype=dtype)
        rewards += torch.arange(num_prompts) * 0.1  # prompts differ, members do not
        assert not shape(rewards, how=how).any()


@every_shaping
@given(
    member=st.integers(0, 7), num_prompts=st.integers(1, 5), raised=st.sampled_from([1e-3, 1.0]), base=values
)
def test_the_only_member_that_did_better_has_the_most_fitness(
    how: Shaping, member: int, num_prompts: int, raised: float, base: float
) -> None:
    rewards = torch.full((8, num_prompts), base, dtype=torch.float64)
    rewards[member] += raised
    fitness = shape(rewards, how=how)
    assert int(fitness.argmax()) == member
    others = [other for other in range(8) if other != member]
    assert (fitness[others] < fitness[member]).all()
    if how != "sign":  # there the twin alone loses
        assert len(fitness[others].unique()) == 1


@given(rewards=matrices(values), data=st.data(), raised=st.sampled_from([0.01, 1.0]))
def test_raising_one_member_raises_its_score_and_lowers_all_others_alike(
    rewards: Tensor, data: st.DataObject, raised: float
) -> None:
    member = data.draw(st.integers(0, len(rewards) - 1))
    better = rewards.clone()
    better[member] += raised
    change = (centred_rewards(better) - centred_rewards(rewards)).mean(dim=1)
    expected = torch.full_like(change, -raised / len(rewards))
    expected[member] += raised
    assert torch.allclose(change, expected, atol=1e-9)


@given(rewards=matrices(values), data=st.data())
def test_rank_follows_the_mean_reward(rewards: Tensor, data: st.DataObject) -> None:
    fitness, means = shape(rewards, how="ranks"), rewards.mean(dim=1)
    left, right = (data.draw(st.integers(0, len(rewards) - 1)) for _ in range(2))
    assume((means[left] - means[right]).abs() > 1e-9)
    assert bool(fitness[left] > fitness[right]) == bool(means[left] > means[right])


def test_plain_formulas() -> None:
    rewards = torch.tensor([[1.0, 3.0], [2.0, 3.0], [3.0, 0.0], [6.0, 6.0]], dtype=torch.float64)
    centred = rewards - rewards.mean(dim=0)
    means = rewards.mean(dim=1)
    assert close(shape(rewards), (centred.mean(dim=1) / centred.square().mean().sqrt()).to(torch.float32))
    z_score = (means - means.mean()) / means.std(correction=0)
    assert close(shape(rewards, how="z-score"), z_score.to(torch.float32))
    assert shape(rewards, how="ranks").tolist() == pytest.approx([-1 / 6, 1 / 6, -0.5, 0.5])
    assert shape(rewards, how="sign").tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_ties_share_their_rank() -> None:
    rewards = torch.tensor([[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [9.0, 0.0]], dtype=torch.float64)
    assert shape(rewards, how="ranks").tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0.5])


# Failed rewards


@every_shaping
def test_a_member_without_rewards_has_no_weight_and_takes_none_from_the_others(how: Shaping) -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    failed = torch.cat([rewards, torch.full((2, 2), torch.nan)])
    fitness = shape(failed, how=how)
    assert fitness[4:].tolist() == [0.0, 0.0]
    assert close(fitness[:4], shape(rewards, how=how))


@every_shaping
def test_nothing_but_failures_is_no_fitness(how: Shaping) -> None:
    assert not shape(torch.full((4, 3), torch.nan), how=how).any()
    assert shape(torch.zeros(4, 0), how=how).tolist() == [0.0] * 4
    assert shape(torch.zeros(0, 3), how=how).tolist() == []


def test_a_failed_row_counts_as_average_on_its_prompt() -> None:
    rewards = torch.tensor([[1.0, math.nan], [1.0, 5.0], [1.0, 3.0], [1.0, 4.0]])
    fitness = shape(rewards)
    assert fitness[0] == 0.0 and fitness[3] == 0.0  # 4 is the mean of the rewards that are there
    assert fitness[1] == -fitness[2] > 0
    # A pair is compared on the prompts that both have.
    assert shape(rewards, how="sign").tolist() == [0.0, 0.0, -1.0, 1.0]


# Whose reward is it


def test_rows_in_any_order_give_their_reward_to_their_member() -> None:
    num_members, num_prompts = 6, 4
    rows = [(member, prompt) for member in range(num_members) for prompt in range(num_prompts)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    for shuffled in (rows, [rows[place] for place in order], sorted(rows, key=lambda row: row[1])):
        matrix = reward_matrix(
            [10.0 * member + prompt for member, prompt in shuffled],
            member_of_row=[member for member, _ in shuffled],
            prompt_of_row=[prompt for _, prompt in shuffled],
            num_members=num_members,
            num_prompts=num_prompts,
        )
        expected = 10.0 * torch.arange(num_members)[:, None] + torch.arange(num_prompts)
        assert torch.equal(matrix, expected.to(torch.float64))


@every_shaping
def test_attribution_fails_where_rows_of_members_are_read_as_rows_of_prompts(how: Shaping) -> None:
    """Rewards collected member after member and reshaped to (prompts, members) mix up the members."""
    num_members, num_prompts, best = 8, 4, 5
    collected = [float(member == best) for member in range(num_members) for _ in range(num_prompts)]
    rows = [(member, prompt) for member in range(num_members) for prompt in range(num_prompts)]
    matrix = reward_matrix(
        collected,
        member_of_row=[member for member, _ in rows],
        prompt_of_row=[prompt for _, prompt in rows],
        num_members=num_members,
        num_prompts=num_prompts,
    )
    right = shape(matrix, how=how)
    assert int(right.argmax()) == best and int((right == right.max()).sum()) == 1
    mixed_up = shape(torch.tensor(collected).reshape(num_prompts, num_members).T, how=how)
    assert not close(mixed_up, right)
    assert int((mixed_up == mixed_up.max()).sum()) != 1 or int(mixed_up.argmax()) != best


def test_rows_that_failed_or_never_ran_are_nan() -> None:
    matrix = reward_matrix(
        [1.0, None], member_of_row=[0, 1], prompt_of_row=[0, 0], num_members=2, num_prompts=2
    )
    assert matrix.isnan().tolist() == [[False, True], [True, True]]
    empty = reward_matrix([], member_of_row=[], prompt_of_row=[], num_members=1, num_prompts=1)
    assert empty.isnan().all()


@pytest.mark.parametrize(
    ("members", "prompts", "message"),
    [
        ([0, 2], [0, 0], "member outside 0..1"),
        ([0, 1], [0, -1], "prompt outside 0..1"),
        ([1, 1], [0, 0], "same member and prompt"),
        ([1], [0], "2 scores, 1 members"),
    ],
)
def test_rows_that_belong_nowhere(members: list[int], prompts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_matrix([1.0, 2.0], member_of_row=members, prompt_of_row=prompts, num_members=2, num_prompts=2)


def test_what_cannot_be_shaped() -> None:
    with pytest.raises(BadInput, match=r"'best'.*known: centred, z-score, ranks, sign"):
        shape(torch.zeros(2, 2), how="best")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="3 members do not make pairs"):
        shape(torch.zeros(3, 2), how="sign")
    with pytest.raises(ValueError, match=r"\[members, prompts\]"):
        shape(torch.zeros(3))
    with pytest.raises(ValueError, match="infinite"):
        shape(torch.full((2, 2), math.inf))
