"""What shapes decide: products, those of maps that share their input, and dropout."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.adapters.lora import shape_plan
from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.shape_plan import LAUNCH_BOUND_TOKENS, ShapePlan, plan_for_shapes
from flatout.engines.adapters.lora.token_blocks import Shape
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.multiplex.products.ranges import Batched, Dense, Loop, Path
from tests.support.adapters_packed import bert, specs

CPU = torch.device("cpu")


def plan_of(
    bank: AdapterBank | None, *, tokens: int = 8, path: Path | None = None, num: int = 3
) -> ShapePlan:
    shapes = tuple(Shape(adapter, 1, tokens) for adapter in range(num))
    return plan_for_shapes(shapes, bank=bank, device=CPU, dtype=torch.float32, path=path)


def test_on_a_cpu_all_maps_are_corrected_in_a_loop() -> None:
    found = plan_of(AdapterBank(bert(num_layers=1), specs()))
    assert isinstance(found.products, Loop) and found.siblings is None
    assert found.path is not None and found.path.value == "loop"


def test_where_launching_costs_most_siblings_take_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the choice is forced, the tensors are real."""
    monkeypatch.setattr(
        shape_plan,
        "choose_path",
        lambda *given, **options: Decision(value="batched", reason="as on a GPU", source="assumed"),
    )
    bank = AdapterBank(bert(num_layers=1), specs())
    few = plan_of(bank)
    assert isinstance(few.products, Batched) and isinstance(few.siblings, Dense)
    assert plan_of(bank, tokens=LAUNCH_BOUND_TOKENS).siblings is None
    assert plan_of(bank, num=1).siblings is None
    assert plan_of(bank, path="batched").siblings is None
    wide = AdapterBank(bert(num_layers=1), specs((128, 128, 128)))
    assert plan_of(wide).siblings is None


def test_dropout_is_one_number_where_adapters_agree_and_one_per_token_where_not() -> None:
    model = bert(num_layers=1)
    same = plan_of(AdapterBank(model, specs(dropout=0.25))).dropout
    assert same is not None and same.keep == 0.75 and same.keep_of_tokens is None
    own = [*specs()[:1], *specs(dropout=0.5)[1:]]
    each = plan_of(AdapterBank(model, own)).dropout
    assert each is not None and each.keep_of_tokens is not None
    assert each.keep_of_tokens.flatten().tolist() == [1.0] * 8 + [0.5] * 16
    assert plan_of(AdapterBank(model, specs())).dropout is None


def test_without_adapters_there_is_a_frame_alone() -> None:
    assert plan_of(None).products is None
    assert plan_of(AdapterBank(bert(num_layers=1), specs((0, 0, 0)))).products is None


def test_a_block_of_an_adapter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match="a block names adapter 3"):
        plan_of(AdapterBank(bert(num_layers=1), specs()), num=4)
