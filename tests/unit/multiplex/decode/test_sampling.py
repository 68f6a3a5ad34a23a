from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatout.ground.errors import BadInput
from flatout.multiplex.decode.sampling import Sampling, pick

ROWS = 20_000


def drawn(logits: Tensor, sampling: Sampling, *, rows: int = ROWS) -> Tensor:
    """Shares of the tokens that many keys draw from one distribution."""
    tokens = pick(
        logits.expand(rows, -1), sampling, keys=torch.arange(rows), positions=torch.full((rows,), 7)
    )
    return torch.bincount(tokens, minlength=logits.shape[-1]) / rows


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(6, 30)
    chosen = pick(logits, Sampling(), keys=torch.arange(6), positions=torch.arange(6))
    assert torch.equal(chosen, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_with_their_probabilities(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    wanted = (logits / temperature).softmax(-1)
    found = drawn(logits, Sampling(temperature=temperature))
    assert float((found - wanted).abs().max()) < 4 * (0.25 / ROWS) ** 0.5  # four standard errors at most


def test_restricted_choices_are_renormalised() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    three = torch.tensor([0.0, 0.4, 0.0, 0.25, 0.2]) / 0.85
    for sampling in (
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.7),  # 0.4 + 0.25 < 0.7: the third is needed
        Sampling(temperature=1.0, top_k=4, top_p=0.7),
    ):
        assert float((drawn(probabilities.log(), sampling) - three).abs().max()) < 0.015
    only = drawn(probabilities.log(), Sampling(temperature=1.0, top_p=1e-6))
    assert only.tolist() == [0, 1, 0, 0, 0]


@settings(max_examples=20)
@given(st.permutations(range(8)), st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}]))
def test_a_row_draws_alike_in_any_company(order: list[int], limits: dict[str, Any]) -> None:
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(3))
    keys, positions = torch.arange(8) * 5, torch.arange(8) + 2
    sampling = Sampling(temperature=1.0, seed=4, **limits)
    together = pick(logits, sampling, keys=keys, positions=positions)
    moved = pick(logits[order], sampling, keys=keys[order], positions=positions[order])
    assert torch.equal(moved, together[order])


def test_another_seed_key_or_position_draws_anew() -> None:
    logits = torch.zeros(50, 1000)
    rows, here = torch.arange(50), torch.full((50,), 3)
    first = pick(logits, Sampling(temperature=1.0), keys=rows, positions=here)
    assert len(set(first.tolist())) > 40
    for sampling, keys, positions in (
        (Sampling(temperature=1.0, seed=1), rows, here),
        (Sampling(temperature=1.0), rows + 50, here),
        (Sampling(temperature=1.0), rows, here + 1),
    ):
        assert int((pick(logits, sampling, keys=keys, positions=positions) == first).sum()) < 5


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is below 0"),
        ({"top_k": 0}, "top_k=0 is below 1"),
        ({"top_p": 0.0}, "top_p=0.0 is not above 0"),
        ({"top_p": 1.5}, "top_p=1.5 is not above 0"),
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        Sampling(**wrong)
