"""The bank: views of one buffer, parameters that are pieces of it, and the names of PEFT."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec, stackable
from flatout.ground.errors import BadInput
from tests.support.adapters_packed import WIDTH, bert, filled, specs


def test_every_linear_map_of_the_layers_is_adapted_and_nothing_else() -> None:
    bank = AdapterBank(bert(), specs())
    assert len(bank.sites) == 2 * 6
    assert not any("pooler" in name for name in bank.sites)


def test_factors_of_a_map_are_one_view_with_adapters_and_ranks_as_rows() -> None:
    bank = AdapterBank(bert(), specs())
    for site in bank.sites.values():
        view = bank.factors[:, :, site.shrink]
        assert view.flatten(0, 1).data_ptr() == view.data_ptr()  # no copy
        assert site.start % 16 == 0 and site.expand.start % 16 == 0
    spans = sorted((part.start, part.stop) for s in bank.sites.values() for part in (s.shrink, s.expand))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_parameter_is_a_piece_of_the_bank_and_its_gradient_too() -> None:
    bank = AdapterBank(bert(), specs())
    (parameter,) = bank.parameters_of(1)
    assert parameter.shape == (24 * bank.width,) and parameter.is_contiguous()
    with torch.no_grad():
        parameter.fill_(3.0)
    assert bank.factors[1, :24].eq(3.0).all() and not bank.factors[1, 24:].any()
    assert not bank.factors[0].eq(3.0).any()
    bank.gradients[1].fill_(2.0)
    assert parameter.grad is not None and parameter.grad.eq(2.0).all()
    bank.zero_gradients()
    assert not parameter.grad.any()


def test_factors_begin_as_in_peft_and_rows_beyond_a_rank_are_zero() -> None:
    bank = AdapterBank(bert(), specs())
    for site in bank.sites.values():
        assert not bank.factors[:, :, site.expand].any()
        drawn = bank.factors[2, :32, site.shrink]
        bound = 1 / math.sqrt(site.num_in)
        assert drawn.abs().max() <= bound and drawn.std() == pytest.approx(bound / math.sqrt(3), rel=0.2)
        assert not bank.factors[0, 16:].any()


def test_an_adapter_begins_the_same_whoever_is_beside_it() -> None:
    model = bert()
    three, one = AdapterBank(model, specs()), AdapterBank(model, specs()[1:2])
    for key, value in one.state_dict("b").items():
        assert three.state_dict("b")[key].equal(value)
    assert not AdapterBank(model, specs(), seed=1).factors.equal(three.factors)
    assert AdapterBank(model, specs()).factors.equal(three.factors)


def test_a_state_comes_back() -> None:
    model = bert()
    bank, other = filled(AdapterBank(model, specs())), AdapterBank(model, specs(), seed=9)
    state = bank.state_dict("b")
    name = "encoder.layer.1.output.dense"
    assert state[f"{name}.lora_A.weight"].shape == (24, 48)
    assert state[f"{name}.lora_B.weight"].shape == (WIDTH, 24)
    other.load_state_dict("b", state)
    assert other.factors[1].equal(bank.factors[1]) and not other.factors[0].equal(bank.factors[0])


def test_half_precision_is_a_copy_written_at_once() -> None:
    bank = filled(AdapterBank(bert(), specs(), dtype=torch.bfloat16))
    assert bank.factors.dtype == torch.float32
    assert bank.working.equal(bank.factors.to(torch.bfloat16))
    bank.factors.mul_(2)
    bank.refresh()
    assert bank.working.equal(bank.factors.to(torch.bfloat16))
    full = AdapterBank(bert(), specs())
    assert full.working is full.factors


def test_adapters_may_have_targets_of_their_own() -> None:
    both = [
        AdapterSpec(name="a", rank=4, targets=("query", "value")),
        AdapterSpec(name="b", rank=8, targets=("output.dense",)),
    ]
    bank = AdapterBank(bert(), both)
    assert {key.rsplit(".lora")[0].rsplit(".")[-1] for key in bank.state_dict("a")} == {"query", "value"}
    assert {key.rsplit(".lora")[0].rsplit(".")[-1] for key in bank.state_dict("b")} == {"dense"}
    query = bank.sites["encoder.layer.0.attention.self.query"]
    assert not bank.factors[1, :, query.shrink].any()


def test_rank_zero_is_no_adapter() -> None:
    bank = AdapterBank(bert(), specs((0, 0)))
    assert bank.parameters_of(0) == [] and bank.state_dict("a") == {} and not bank.sites
    mixed = AdapterBank(bert(), specs((0, 8)))
    assert mixed.parameters_of(0) == [] and mixed.parameters_of(1)


def test_bad_input_is_named() -> None:
    model = bert()
    with pytest.raises(BadInput, match=r"near: .*query"):
        AdapterBank(model, [AdapterSpec(name="a", rank=4, targets=("qury",))])
    with pytest.raises(BadInput, match="each with its own name"):
        AdapterBank(model, [*specs(), *specs()])
    with pytest.raises(BadInput, match=r"rank -1 is negative; dropout 1\.0"):
        AdapterSpec(name="a", rank=-1, dropout=1.0)
    bank = AdapterBank(model, [AdapterSpec(name="sentiment", rank=4)])
    with pytest.raises(BadInput, match="did you mean sentiment"):
        bank.number("sentimen")
    state = bank.state_dict("sentiment")
    with pytest.raises(BadInput, match="other targets or another model"):
        bank.load_state_dict("sentiment", dict(list(state.items())[2:]))
    before = bank.factors.clone()
    wrong = {key: value[:1] for key, value in state.items()}
    with pytest.raises(BadInput, match="the rank and the model"):
        bank.load_state_dict("sentiment", wrong)
    assert bank.factors.equal(before)


def test_only_equal_maps_at_equal_distances_are_stacked() -> None:
    names = [f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    bank = AdapterBank(bert(num_layers=1), specs())
    sites = [bank.sites[name] for name in names]
    assert stackable(sites) and stackable(sites[:2]) and stackable(sites[::2])
    assert not stackable(sites[:1])
    assert not stackable([sites[0], bank.sites["encoder.layer.0.intermediate.dense"]])
    assert not stackable([sites[0], sites[1], bank.sites["encoder.layer.0.output.dense"]])
