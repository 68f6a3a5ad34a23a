"""Real values beside tensors without data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.memory.trace import known_values
from flatout.memory.trace.known_values import value_of, with_value
from tests.support.memory import under_rules


def values_of(*tensors: Tensor) -> list[Any]:
    known = [value_of(tensor) for tensor in tensors]
    with torch.utils._python_dispatch._disable_current_modes():
        return [None if value is None else value.tolist() for value in known]


def of_integers() -> list[Any]:
    x = torch.arange(6).reshape(2, 3)
    mask = x > 2
    return values_of(x + 1, mask, mask.sum(dim=1), x.cumsum(1), (x.float() * 2)[0])


def test_integers_and_short_tables_keep_their_values() -> None:
    assert under_rules(of_integers).result == [
        [[1, 2, 3], [4, 5, 6]],
        [[False, False, False], [True, True, True]],
        [0, 3],
        [[0, 1, 3], [3, 7, 12]],
        [0.0, 2.0, 4.0],
    ]


def of_a_mask_in_floating_point() -> list[Any]:
    keep = torch.ones(4, 1, 300, 300, dtype=torch.bool)
    keep[0, 0, 0, 7] = False
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)[:, 0, 0, :]
    return values_of((added > 0).any(), (added < 0).sum())


def test_a_mask_that_was_turned_into_floating_point_is_followed() -> None:
    assert under_rules(of_a_mask_in_floating_point).result == [False, 1]


def of_changes_in_place() -> list[Any]:
    mask = torch.ones(2, 2, dtype=torch.bool)
    mask[0, 1] = False
    counter = torch.tensor(0.0)
    torch._foreach_add_([counter], 1)
    return values_of(mask, counter)


def test_changes_in_place_are_followed() -> None:
    assert under_rules(of_changes_in_place).result == [[[True, False], [True, True]], 1.0]


def of_copies() -> list[Any]:
    counted, drawn = nn.BatchNorm1d(3), nn.Linear(2, 1)  # a bias of one number is drawn from a known range
    copies = [copy.deepcopy(counted), copy.deepcopy(drawn)]
    counter = copies[0].num_batches_tracked
    counter += 1
    assert copies[1].bias.untyped_storage()._cdata != drawn.bias.untyped_storage()._cdata
    return values_of(counted.num_batches_tracked, counter)


def test_modules_are_copied_with_what_is_known_of_them() -> None:
    assert under_rules(of_copies).result == [0, 1]


def of_names() -> list[str]:
    known, drawn = torch.tensor([3, 4])[1], torch.randn(5).mean()
    return [f"expert_{known}", f"{known:03d}", f"loss {drawn:.2f}"]


def test_a_number_is_printed_as_it_is_with_data() -> None:
    assert under_rules(of_names).result == ["expert_4", "004", "loss 1.00"]


def of_what_is_unknown() -> list[Any]:
    drawn = torch.randn(4)
    written = torch.zeros(4, dtype=torch.long)
    written.copy_((drawn * 10).long())
    large = torch.zeros(known_values.LARGEST + 1)
    return values_of(drawn, drawn > 0, written, torch.empty(3, dtype=torch.long), large)


def test_what_comes_from_random_or_unwritten_data_is_unknown() -> None:
    assert under_rules(of_what_is_unknown).result == [None] * 5


def of_choices() -> list[Any]:
    scores = torch.randn(6, 3)
    return values_of(scores.argmax(-1), scores.topk(2, dim=-1).indices, scores.max(dim=0).indices)


def test_choices_are_even_and_noted() -> None:
    made = under_rules(of_choices)
    assert made.result == [[0, 1, 2, 0, 1, 2], [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0], [1, 2]], [0, 1, 2]]
    assert set(made.guesses) == {"every choice equally often"}


def layers_kept(share: float) -> int:
    return sum(not bool(torch.rand([]) < share) for _ in range(3))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_draw_that_decides_drops_no_layer(share: float) -> None:
    made = under_rules(layers_kept, share)
    assert made.result == 3
    assert set(made.guesses) == {"a number drawn evenly taken as the upper end of its range"}


def of_ranges() -> list[Any]:
    return values_of(torch.empty(1).uniform_(2.0, 4.0), torch.rand(2))


def test_a_draw_stays_below_the_end_of_its_own_range() -> None:
    (drawn,), several = under_rules(of_ranges).result
    assert 3.999 < drawn < 4.0 and several is None


def of_known_scores() -> list[Any]:
    return values_of(torch.tensor([3, 9, 4]).argmax(), torch.tensor([3, 9, 4]).sort().indices)


def of_checks() -> list[Any]:
    x = torch.empty(2, 3)
    checks = [torch.isnan(x).any(), torch.isinf(x), torch.isnan(torch.tensor([1.0, torch.nan]))]
    assert not torch.isnan(x).any() and torch.isfinite(x).all()  # as scripts check their losses
    return values_of(*checks)


def test_numbers_that_are_not_known_are_finite_and_that_is_noted() -> None:
    made = under_rules(of_checks)
    assert made.result == [False, [[False] * 3] * 2, [False, True]]
    assert "every number taken as finite" in made.guesses


def test_choices_among_known_values_are_true_and_no_guess() -> None:
    made = under_rules(of_known_scores)
    assert made.result == [1, [0, 2, 1]]
    assert made.guesses == []


def test_a_plain_tensor_is_its_own_value() -> None:
    real = torch.tensor([1, 2])
    assert value_of(real) is real
    carried = with_value(real)
    assert value_of(carried) is real


@pytest.mark.parametrize(("length", "branch"), [(3, "full"), (2, "padded")])
def test_branches_go_the_way_of_the_real_run(length: int, branch: str) -> None:
    def choose() -> str:
        mask = torch.arange(3) < length
        return "full" if bool(mask.all()) else "padded"

    made = under_rules(choose)
    assert (made.result, made.guesses) == (branch, [])
