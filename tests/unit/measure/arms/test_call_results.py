from __future__ import annotations

import pytest
import torch

from flatout.measure.arms.call_results import FollowedResults, attached, tensors_in

SOURCE = 1


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def written(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4)
    buffer[1] = x.sum()
    return buffer


def added(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3)
    total.add_(x)
    return total


def stacked(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.ones(3), x])


def largest(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.argmax(0, keepdim=True)


@pytest.mark.parametrize("compute", [doubled, written, added, stacked, largest])
def test_what_is_computed_from_a_result_is_followed(compute: object) -> None:
    with FollowedResults() as followed:
        result, other = torch.ones(3), torch.ones(3)
        followed.follow((result, {"state": result}), SOURCE)
        assert followed.is_from(compute(result), SOURCE)  # type: ignore[operator]
        assert not followed.is_from(compute(other), SOURCE)  # type: ignore[operator]
        assert not followed.depends(other, SOURCE)


def test_after_a_result_was_read_anything_may_depend_on_it() -> None:
    with FollowedResults() as followed:
        result, other = torch.ones(3), torch.ones(3)
        followed.follow(result, SOURCE)
        other.sum().item()
        assert not followed.depends(other, SOURCE)
        result.sum().item()
        assert followed.depends(other, SOURCE) and not followed.is_from(other, SOURCE)
        followed.forget()
        assert not followed.depends(result, SOURCE)


def test_gradients_of_an_attached_tensor_have_gradients_too() -> None:
    """A residual of a differential equation takes the second derivative of the network."""
    x = torch.ones(3, requires_grad=True)
    u = attached(torch.arange(3.0), [x * 2])
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == second.tolist() == [0.0, 0.0, 0.0]


def test_a_kept_tensor_is_attached_to_what_has_gradients() -> None:
    kept, source, plain = torch.arange(3.0), torch.ones(2, requires_grad=True), torch.ones(2)
    result = attached(kept, [source, plain])
    assert torch.equal(result, kept)
    result.sum().backward()
    assert source.grad is not None and source.grad.tolist() == [0.0, 0.0]
    assert attached(kept, [plain]) is kept
    with torch.no_grad():
        assert attached(kept, [source]) is kept


def test_tensors_are_found_in_arguments() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [each.shape[0] for each in tensors_in(((a, "text"), {"rows": [b]}))] == [1, 2]
