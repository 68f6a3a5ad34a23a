"""The order of a second backward is that of a device with a thread of its own."""

from __future__ import annotations

import torch

from flatout.memory.trace.device_thread import device_thread


def slope_of(x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad((x * x).exp().sum(), x, create_graph=True)
    return slope


def number(tensor: torch.Tensor) -> int:
    assert tensor.grad_fn is not None
    return int(tensor.grad_fn._sequence_nr())


def test_the_thread_that_makes_more_nodes_is_ahead_after_some_steps() -> None:
    x = torch.ones(2, requires_grad=True)
    with device_thread() as thread:
        slope = slope_of(x)
        (curved,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        assert thread.made_graphs
        assert number(slope) < number(curved) < 100  # a new thread has made few nodes
        here = number(x * 1)
        thread.go_on()
        assert number(slope_of(x)) - number(curved) > 50
        assert number(x * 1) - here < 50
    assert torch.equal(curved, torch.autograd.grad(slope_of(x).sum(), x)[0])


def test_a_plain_backward_stays_in_its_thread() -> None:
    x = torch.ones(2, requires_grad=True)
    with device_thread() as thread:
        (x * x).sum().backward()
        assert not thread.made_graphs
    assert slope_of(x).shape == (2,)


def test_slopes_by_torch_func_stay_in_their_thread() -> None:
    def energy(x: torch.Tensor) -> torch.Tensor:
        return (x * x).exp().sum()

    x = torch.ones(3, 2, requires_grad=True)
    with device_thread() as thread:
        slopes = torch.func.vmap(torch.func.jacrev(torch.func.grad(energy)))(x)
        slopes.sum().backward()
        assert not thread.made_graphs
    assert slopes.shape == (3, 2, 2) and x.grad is not None


def test_autocast_holds_in_the_thread() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with device_thread(), torch.autocast("cpu", dtype=torch.bfloat16):
        (slope,) = torch.autograd.grad((x @ x).float().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(slope.sum(), x, allow_unused=True)
    assert slope.requires_grad and (plain is None or plain.shape == x.shape)


def test_weights_stay_cast_over_a_graph_of_gradients() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2, requires_grad=True)
    with device_thread() as thread, torch.autocast("cpu", dtype=torch.bfloat16):
        before = x @ weight
        torch.autograd.grad(before.float().sum(), x, create_graph=True)
        assert thread.made_graphs
        after = x @ weight
    assert before.grad_fn is not None and after.grad_fn is not None
    casts = [each.grad_fn.next_functions[1][0] for each in (before, after)]  # type: ignore[union-attr]
    assert casts[0] is casts[1]
