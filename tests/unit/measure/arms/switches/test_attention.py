from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from flatout.measure.arms.switches.attention import FusedAttention, propose
from flatout.measure.clock import Clock
from flatout.measure.evidence import Place, Site
from flatout.measure.user_code import UserCode

Attention = Callable[[Any, Any, Any], Any]
LENGTH = 16
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
BIAS = torch.zeros(LENGTH, LENGTH).masked_fill(~LOWER, -1e9)


def by_operators(q: Any, k: Any, v: Any) -> Any:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~LOWER, float("-inf"))
    return functional.dropout(functional.softmax(scores, dim=-1), 0.0) @ v


def by_functions(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    assert scores.size(-1) == scores.shape[-1] == k.shape[-2]
    weights = torch.nn.Dropout(0.0)(torch.nn.Softmax(-1)(scores.float())).type_as(q)
    return torch.matmul(weights, v)


def by_a_bias(q: Any, k: Any, v: Any) -> Any:
    bias = BIAS.expand(len(q), LENGTH, LENGTH)
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) + bias).softmax(-1), v)


def by_a_mask_in_place(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores.masked_fill_(~LOWER, -1e9)
    return torch.matmul(scores.softmax(-1), v)


def watched(attention: Attention) -> FusedAttention:
    """An arm about every line of this file."""
    code = attention.__code__
    products = [
        Place(file=Path(__file__).name, line=line, function=attention.__name__)
        for line in range(code.co_firstlineno, code.co_firstlineno + 9)
    ]
    return FusedAttention(UserCode(str(Path(__file__).parent)), Clock(), products, place=None)


@pytest.mark.parametrize(
    ("attention", "shape"),
    [(by_operators, (2, 3)), (by_functions, (2, 3)), (by_a_bias, (6,)), (by_a_mask_in_place, (2, 3))],
)
def test_one_call_computes_the_same_with_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, attention: Attention, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, LENGTH, 8, requires_grad=True) for _ in range(3)]
    calls: list[bool] = []
    fused = functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["is_causal"])
        return fused(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    plain = attention(*inputs)
    wanted = torch.autograd.grad(plain.square().sum(), inputs)
    arm = watched(attention)
    arm.begin()
    for _ in range(2):
        result = attention(*inputs)
        arm.step_end()
    arm.end()
    assert calls == [attention in (by_operators, by_a_mask_in_place)] * 2
    assert not arm.fell_back and arm.refusal is None
    assert torch.allclose(result, plain, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(result.square().sum(), inputs), wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    assert torch.equal(attention(*inputs), plain) and len(calls) == 2


def looked_at(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v, scores.amax(), scores.shape


def test_scores_that_are_looked_at_are_computed_and_the_step_does_not_count() -> None:
    q = torch.randn(2, LENGTH, 8)
    plain = looked_at(q, q, q)
    arm = watched(looked_at)
    arm.begin()
    result = looked_at(q, q, q)
    assert arm.fell_back
    arm.end()
    assert torch.allclose(result[0], plain[0], atol=1e-5)
    assert torch.equal(result[1], plain[1]) and result[2] == plain[2]


def written_into(q: Any, k: Any, v: Any) -> Any:
    """Seen in a public transformer: the mask is written into the scores."""
    scores = torch.bmm(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
    rows, columns = torch.triu_indices(LENGTH, LENGTH, offset=1)
    scores[..., rows, columns] = float("-inf")
    assert bool((scores[0] > -1).any()) and len(scores) == len(q)
    weights = functional.softmax(scores - 1.0, dim=2)
    return torch.bmm(weights, v), (-weights).sum()


def filled_in_place(q: Any, k: Any, v: Any) -> Any:
    scores = torch.bmm(q, k.transpose(1, 2))
    scores.clamp_(max=0.5)
    scores.masked_fill_(~LOWER, -1e9)
    return torch.bmm(torch.softmax(scores, dim=-1), v), scores.mean()


@pytest.mark.parametrize("attention", [written_into, filled_in_place])
def test_scores_that_are_changed_in_place_stay_changed(attention: Attention) -> None:
    q = torch.randn(2, LENGTH, 8)
    plain = attention(q, q, q)
    arm = watched(attention)
    arm.begin()
    result = attention(q, q, q)
    assert arm.fell_back
    arm.end()
    for mine, theirs in zip(result, plain, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_other_products_stay_as_they_are_and_none_put_off_refuses() -> None:
    arm = watched(by_operators)
    arm.begin()
    assert isinstance(torch.ones(2, 3, 3) @ torch.ones(2, 3, 3), torch.Tensor)
    arm.step_end()
    arm.end()
    assert arm.refusal == "the products of the script's attention could not be deferred"


def test_it_is_proposed_for_attention_of_the_users_own(context: Any) -> None:
    place = Place(file="model.py", line=3)
    sites = [
        Site(kind="call", op=op, place=place, via=None, calls_per_step=6.0)
        for op in ("attention", "attention product")
    ]
    (arm,) = propose(context(sites=tuple(sites)))
    assert (arm.kind, arm.place) == ("fused-attention", place)
    assert not list(propose(context(sites=(sites[1],))))
