"""Each group as if alone: its rate, its clipping, its loss scale, its state."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.optimizer import SHARED, AdapterOptimizer, StepSettings
from flatout.ground.errors import BadInput
from tests.support.adapters_packed import bert, filled, heads, specs


def made(
    *, shared: nn.Module | None = None, loss_scaling: bool = False, shared_by: list[str] | None = None
) -> AdapterOptimizer:
    bank = filled(AdapterBank(bert(num_layers=1), specs()))
    rates = {"a": 1e-3, "b": 2e-3, "c": 3e-3, SHARED: 1e-3}
    return AdapterOptimizer(
        bank,
        settings={name: StepSettings(lr=rate, num_steps=10) for name, rate in rates.items()},
        heads=heads(bank.names),
        shared=shared,
        shared_by=shared_by,
        loss_scaling=loss_scaling,
    )


def fill(optimizer: AdapterOptimizer, *, seed: int = 0, scale: float = 1.0) -> None:
    """Random gradients everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for gradient in optimizer.gradients(optimizer.bank.names):
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * scale)


def test_a_schedule_warms_up_and_ends_at_its_end() -> None:
    settings = StepSettings(lr=1.0, num_steps=20, warmup_share=0.25)
    rates = [settings.rate_at(step) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(rates) == 1.0 and rates[19] == pytest.approx(1 / 15) and rates[20] == 0.0
    assert settings.rate_at(40) == 0.0


@given(st.integers(1, 50), st.floats(0, 1))
def test_a_rate_is_never_negative_nor_above_its_top(num_steps: int, warmup: float) -> None:
    settings = StepSettings(lr=2.0, num_steps=num_steps, warmup_share=warmup)
    assert all(0 <= settings.rate_at(step) <= 2.0 for step in range(num_steps + 2))


def test_an_update_is_adamw_with_the_clipping_of_its_own_norm() -> None:
    optimizer = made()
    bank = optimizer.bank
    fill(optimizer, scale=3.0)
    (row,) = bank.parameters_of(1)
    head = optimizer._groups["b"].parameters[1:]
    theirs = [nn.Parameter(one.detach().clone()) for one in (row, *head)]
    for own, their in zip((row, *head), theirs, strict=True):
        assert own.grad is not None
        their.grad = own.grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    rate = optimizer.rate("b")
    torch.optim.AdamW(theirs, lr=rate, weight_decay=0.01).step()
    optimizer.write_rates()
    optimizer.update(["a", "b", "c"])
    for own, their in zip((row, *head), theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-6, atol=1e-7)
        assert own.grad is not None and not own.grad.any()


def test_rows_beyond_a_rank_stay_zero() -> None:
    optimizer = made()
    for seed in range(3):
        fill(optimizer, seed=seed)
        optimizer.write_rates()
        optimizer.update(["a", "b", "c"])
    assert not optimizer.bank.factors[0, 16:].any() and not optimizer.bank.factors[1, 24:].any()


def test_only_those_named_and_active_are_updated() -> None:
    optimizer = made(shared=nn.Linear(2, 2), shared_by=["c"])
    optimizer.finish("b")
    assert optimizer.active == ("a", "c")
    before = optimizer.bank.factors.clone()
    shared = optimizer._groups[SHARED].parameters[0]
    kept = shared.clone()
    fill(optimizer)
    optimizer.write_rates()
    optimizer.update(["a", "b"])
    optimizer.count(["a", "b"])
    changed = [not optimizer.bank.factors[number].equal(before[number]) for number in range(3)]
    assert changed == [True, False, False] and shared.equal(kept)
    assert [optimizer.num_steps(name) for name in ("a", "b", "c", SHARED)] == [1, 0, 0, 0]
    fill(optimizer)
    optimizer.update(["c"])
    assert not shared.equal(kept)


def test_a_state_goes_on_bit_for_bit() -> None:
    first, second = made(shared=nn.Linear(2, 2)), made(shared=nn.Linear(2, 2))
    second._groups[SHARED].parameters[0].data.copy_(first._groups[SHARED].parameters[0].data)
    names = first.bank.names
    for seed in range(3):
        fill(first, seed=seed)
        first.write_rates()
        first.update(names)
        first.count(names)
    tensors, numbers = first.state()
    assert all("." in key for key in tensors)
    second.bank.factors.copy_(first.bank.factors)
    second.load_state({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(numbers)))
    for optimizer in (first, second):
        fill(optimizer, seed=9)
        optimizer.write_rates()
        optimizer.update(names)
    assert second.bank.factors.equal(first.bank.factors)
    assert second.num_steps("b") == 3 and second.rate("b") == first.rate("b")


def test_a_foreign_state_is_refused() -> None:
    optimizer = made()
    fill(optimizer)
    optimizer.update(["a"])
    tensors, numbers = optimizer.state()
    with pytest.raises(BadInput, match="resume with the tasks"):
        optimizer.load_state(tensors, {**numbers, "num_steps": {"x": 1}})
    with pytest.raises(BadInput, match="the ranks and heads"):
        optimizer.load_state({**tensors, "a.0.exp_avg": torch.zeros(3)}, numbers)
    with pytest.raises(BadInput, match=r"1 tensors that this run lacks, first a\.9\.exp_avg"):
        optimizer.load_state({**tensors, "a.9.exp_avg": torch.zeros(3)}, numbers)


def test_an_overflow_skips_its_own_adapter_only() -> None:
    optimizer = made(loss_scaling=True)
    assert optimizer.scales_losses
    loss = torch.ones((), requires_grad=True)
    for name in optimizer.bank.names:
        assert optimizer.scaled(name, loss) == 65536.0
    fill(optimizer)
    optimizer.bank.gradients[1, 0, 0] = float("inf")
    before = optimizer.bank.factors.clone()
    optimizer.write_rates()
    optimizer.update(optimizer.bank.names)
    changed = [not optimizer.bank.factors[number].equal(before[number]) for number in range(3)]
    assert changed == [True, False, True]
    scales = [optimizer.scaled(name, loss).item() for name in optimizer.bank.names]
    assert scales == [65536.0, 32768.0, 65536.0]
    other = made(loss_scaling=True)
    other.load_state(*optimizer.state())
    assert other.scaled("b", loss).item() == 32768.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_reaches_no_parameter(value: float) -> None:
    optimizer = made()
    fill(optimizer)
    optimizer.bank.gradients[1, 0, 3] = value
    optimizer.write_rates()
    before = optimizer.bank.factors.clone()
    optimizer.update(optimizer.bank.names)
    assert optimizer.bank.factors.isfinite().all()
    for number in (0, 2):
        assert not optimizer.bank.factors[number].equal(before[number])
    fill(optimizer, seed=1)
    optimizer.update(optimizer.bank.names)
    assert not optimizer.bank.factors[1].equal(before[1]), "it goes on with the next batch"


def test_what_is_shared_ties_the_loss_scales() -> None:
    optimizer = made(loss_scaling=True, shared=nn.Linear(2, 2))
    loss = torch.ones(())
    assert optimizer.scaled("a", loss) == 65536.0
    fill(optimizer)
    optimizer.bank.gradients[1, 0, 0] = float("nan")
    optimizer.update(optimizer.bank.names)
    assert {optimizer.scaled(name, loss).item() for name in optimizer.bank.names} == {32768.0}


def test_every_adapter_needs_settings() -> None:
    bank = AdapterBank(bert(num_layers=1), specs())
    with pytest.raises(BadInput, match="no settings for b, c"):
        AdapterOptimizer(bank, settings={"a": StepSettings()}, heads={})


def test_a_group_without_parameters_is_no_group() -> None:
    bank = AdapterBank(bert(num_layers=1), specs((0, 4)))
    optimizer = AdapterOptimizer(bank, settings={"a": StepSettings(), "b": StepSettings()}, heads={})
    optimizer.update(["a", "b"])
    optimizer.write_rates()
    assert optimizer.state()[1]["num_steps"] == {"a": 0, "b": 0}
