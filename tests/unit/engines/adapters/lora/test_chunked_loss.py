"""The chunked loss is the plain one, in value and gradient, without its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engines.adapters.lora.chunked_loss import (
    IGNORED,
    chunked_argmax,
    chunked_cross_entropy,
    rows_per_chunk,
)


def drawn(places: int, width: int, vocabulary: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(places, width, generator=random, dtype=torch.float64)
    embedding = torch.randn(vocabulary, width, generator=random, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=random, dtype=torch.float64)
    targets = torch.randint(vocabulary, (places,), generator=random)
    targets[torch.rand(places, generator=random) < 0.3] = IGNORED
    return hidden, embedding, bias, targets


def plain(hidden: Tensor, embedding: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ embedding.T + bias, targets, ignore_index=IGNORED)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(2, 30), st.integers(1, 2000), st.integers(0, 99))
def test_value_and_gradients_are_those_of_plain_cross_entropy(
    places: int, width: int, vocabulary: int, max_bytes: int, seed: int
) -> None:
    hidden, embedding, bias, targets = drawn(places, width, vocabulary, seed=seed)
    targets[0] = 1  # torch's mean of nothing is NaN; ours is tested below
    leaves = [part.clone().requires_grad_() for part in (hidden, embedding, bias)]
    loss = chunked_cross_entropy(leaves[0], leaves[1], targets, bias_V=leaves[2], max_chunk_bytes=max_bytes)
    (3 * loss).backward()  # another factor than 1, as a loss scale would be
    others = [part.clone().requires_grad_() for part in (hidden, embedding, bias)]
    expected = plain(*others, targets)
    (3 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    for own, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=5e-6)  # sums in another order


def test_nothing_to_name_costs_nothing_and_changes_nothing() -> None:
    hidden, embedding, _, _ = drawn(5, 4, 7, seed=0)
    hidden.requires_grad_()
    loss = chunked_cross_entropy(hidden, embedding, torch.full((5,), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()


def test_a_frozen_vocabulary_gets_no_gradient() -> None:
    hidden, embedding, _, targets = drawn(6, 4, 9, seed=1)
    hidden.requires_grad_()
    chunked_cross_entropy(hidden, embedding, targets).backward()
    assert hidden.grad is not None and hidden.grad.any()
    assert embedding.grad is None


def test_in_half_precision_it_follows_the_full_one() -> None:
    hidden, embedding, _, targets = drawn(32, 16, 50, seed=2)
    half = hidden.to(torch.bfloat16).requires_grad_()
    loss = chunked_cross_entropy(half, embedding.to(torch.bfloat16), targets, max_chunk_bytes=1000)
    loss.backward()
    whole = half.detach().double().requires_grad_()
    expected = chunked_cross_entropy(whole, embedding.to(torch.bfloat16).double(), targets)
    expected.backward()
    assert half.grad is not None and whole.grad is not None and half.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert F.cosine_similarity(half.grad.double().flatten(), whole.grad.flatten(), dim=0) > 0.99


def test_a_loss_scale_beyond_half_precision_does_not_spoil_small_gradients() -> None:
    hidden = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    embedding = torch.eye(4, dtype=torch.float16) * 0.01
    loss = chunked_cross_entropy(hidden, embedding, torch.tensor([2]))
    (loss * 2**17).backward()
    assert hidden.grad is not None
    torch.testing.assert_close(
        hidden.grad.float(), 2**17 * 0.01 * (0.25 - torch.eye(4)[2:3]), rtol=2e-3, atol=0
    )


def test_under_autocast_the_vocabulary_is_multiplied_in_its_precision() -> None:
    hidden, embedding, bias, targets = drawn(8, 4, 20, seed=3)
    full = [part.float().requires_grad_() for part in (hidden, embedding, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(full[0], full[1], targets, bias_V=full[2])
    loss.backward()
    assert loss.item() == pytest.approx(plain(hidden, embedding, bias, targets).item(), rel=0.03)
    assert all(part.grad is not None and part.grad.dtype == torch.float32 for part in full)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives, and the rows of products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_no_tensor_holds_all_logits() -> None:
    places, width, vocabulary, rows = 256, 8, 1000, 16
    hidden = torch.randn(places, width, requires_grad=True)
    embedding, targets = torch.randn(vocabulary, width), torch.randint(vocabulary, (places,))
    with Largest() as chunked:
        chunked_cross_entropy(hidden, embedding, targets, max_chunk_bytes=4 * vocabulary * rows).backward()
    with Largest() as whole:
        F.cross_entropy(hidden @ embedding.T, targets).backward()
    assert whole.elements == places * vocabulary
    assert chunked.elements == rows * vocabulary


def test_argmax_is_that_of_the_whole_and_of_nothing_is_nothing() -> None:
    hidden, embedding, bias, _ = drawn(33, 5, 17, seed=4)
    expected = (hidden @ embedding.T + bias).argmax(1)
    found = chunked_argmax(hidden, embedding, bias_V=bias, max_chunk_bytes=4 * 17 * 4)
    assert torch.equal(found, expected)
    assert len(chunked_argmax(hidden[:0], embedding)) == 0


def test_a_chunk_has_a_row_at_least() -> None:
    assert rows_per_chunk(1000, max_bytes=40_000) == 10
    assert rows_per_chunk(1000, max_bytes=1) == 1
