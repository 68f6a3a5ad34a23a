"""Everything is an integer: the noise, the vote, the move; and it learns."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.population.weights import Stack
from flatout.engines.evolution.update.integer import (
    EXACT_TERMS,
    LARGEST,
    IntegerMasters,
    NoiseTable,
    step_of,
    threshold_of,
    vote,
)
from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from tests.support.evolution import small_net

CPU = torch.device("cpu")


def stack_of(
    names: tuple[str, ...], variants: range, *, rank: int = 1, seed: int = 3, epoch: int = 0, width: int = 4
) -> Stack:
    """Matrices [6, width]."""
    shrink, expand = (
        torch.zeros(len(names), len(variants), rank, side, dtype=torch.int8) for side in (width, 6)
    )
    stack = Stack(shrink, expand, (1.0,) * len(names))
    NoiseTable.drawn(seed, device=CPU).fill(names, stack, variants=variants, epoch=epoch)
    return stack


def drawn(variants: range, *, epoch: int = 0, parameter: str = "w", rank: int = 1) -> Factors:
    return stack_of((parameter,), variants, rank=rank, epoch=epoch)[0]


def test_any_process_finds_the_same_slices() -> None:
    whole = drawn(range(10), rank=2)
    part = drawn(range(4, 7), rank=2)
    assert part.shrink.equal(whole.shrink[4:7]) and part.expand.equal(whole.expand[4:7])
    assert whole.shrink.dtype == torch.int8


def test_a_stack_holds_the_slices_of_each_matrix_alone() -> None:
    both = stack_of(("v", "w"), range(3, 8), rank=2, epoch=1)
    for number, name in enumerate(("v", "w")):
        alone = drawn(range(3, 8), parameter=name, rank=2, epoch=1)
        assert both[number].shrink.equal(alone.shrink) and both[number].expand.equal(alone.expand)


def test_slices_differ_by_variant_parameter_side_and_epoch() -> None:
    one = drawn(range(2))
    assert not one.shrink[0].equal(one.shrink[1])
    assert not one.shrink.equal(drawn(range(2), epoch=1).shrink)
    assert not one.shrink.equal(drawn(range(2), parameter="v").shrink)
    assert not one.expand[:, :, :4].equal(one.shrink)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_vote_is_exact_beyond_what_one_float_sum_holds(rank: int) -> None:
    num = 2 * EXACT_TERMS + 5
    full = torch.full((num, rank, 4), LARGEST, dtype=torch.int8)
    signs = torch.ones(num)

    def draw(variants: range) -> Stack:
        rows = slice(variants.start, variants.stop)
        return Stack(full[None, rows, :, :3], full[None, rows], (1.0,))

    assert vote(draw, signs).unique().tolist() == [num * rank * LARGEST**2]


def test_the_vote_is_the_sum_of_signed_products() -> None:
    signs = torch.tensor([1.0, -1.0, 0.0, 1.0])
    votes = vote(lambda variants: stack_of(("v", "w"), variants, rank=2), signs)
    for number, name in enumerate(("v", "w")):
        whole = drawn(range(4), rank=2, parameter=name)
        expected = sum(int(signs[v]) * whole.expand[v].long().T @ whole.shrink[v].long() for v in range(4))
        assert votes[number].long().equal(expected)


def test_only_votes_past_the_threshold_move_a_weight_by_one_and_none_leaves_int8() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, 0.0]])  # the step is 1/64: 64, -64, 32, 0
    other = torch.tensor([[0.0, 0.0, 0.0, 2.0]])  # the step is 1/32
    names = ("w", "v")
    masters = IntegerMasters({"w": weight, "v": other}, stacks=[names], threshold=10)
    found = masters.step(names, torch.tensor([[[11, -11, 10, -10]], [[-12, 0, 0, 0]]], dtype=torch.int32))
    assert masters["w"].tolist() == [[65, -65, 32, 0]]
    assert masters["v"].tolist() == [[-1, 0, 0, 64]]
    assert weight.tolist() == [[65 / 64, -65 / 64, 0.5, 0.0]]
    assert other.tolist() == [[-1 / 32, 0.0, 0.0, 2.0]]
    moved = 2 / 64**2 + 1 / 32**2
    weights = float(weight.square().sum() + other.square().sum())
    assert found.tolist() == pytest.approx([2 * 11**2 + 2 * 10**2 + 12**2, moved, weights])
    for _ in range(100):
        masters.step(names, torch.tensor([[[99, -99, 0, 0]], [[0] * 4]], dtype=torch.int32))
    assert masters["w"].tolist() == [[LARGEST, -LARGEST, 32, 0]]


def test_the_step_is_a_power_of_two_that_holds_the_largest_weight() -> None:
    for largest in (0.3, 1.0, 127.0, 1e-5):
        step = step_of(torch.tensor([largest, -largest / 3]))
        assert torch.frexp(torch.tensor(step))[0] == 0.5
        assert largest / step <= LARGEST < 2 * largest / step + 1
    assert step_of(torch.zeros(3)) > 0


def test_so_many_weights_move_where_fitness_says_nothing() -> None:
    torch.manual_seed(0)
    signs = torch.randint(0, 2, (256,)) * 2.0 - 1
    votes = vote(lambda variants: stack_of(("w",), variants, seed=1, width=600), signs)
    moved = (votes.abs() > threshold_of(0.1, num_variants=256, rank=1)).float().mean()
    assert 0.05 < moved < 0.15


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(BadInput, match="share"):
        threshold_of(share, num_variants=4, rank=1)


def test_int8_weights_learn_and_resume_bit_for_bit() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 6)
    labels = inputs[:, :3].argmax(-1)

    def made() -> Eggroll:
        return Eggroll(small_net(), population=128, sigma=0.05, lr=0.5, arithmetic="int8", seed=5)

    def train(es: Eggroll, epochs: int) -> list[float]:
        seen = []
        for _ in range(epochs):
            with es.forward(rows_per_member=16) as members:
                output = members(inputs.repeat(128, 1)).view(128, 16, 3)
            rewards = (output.argmax(-1) == labels).float()
            seen.append(float(rewards.mean()))
            es.tell(rewards)
        return seen

    whole, begun = made(), made()
    rewards = train(whole, 45)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    train(begun, 30)
    resumed = made()
    resumed.load({name: value.clone() for name, value in begun.tensors().items()}, epoch=30)
    train(resumed, 15)
    for name in whole.targets:
        assert resumed.masters[name].equal(whole.masters[name])
        assert whole.masters[name].dtype == torch.int8


def test_a_state_without_int8_weights_is_refused() -> None:
    with pytest.raises(BadInput, match="int8 weights"):
        IntegerMasters({"w": torch.ones(2, 2)}, stacks=[("w",)], threshold=1).load({})
