"""Small steps add up in fp32, the optimizer is torch's, and a resumed one goes on bit for bit."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.evolution.masters import Masters, choose_place
from flatout.errors import BadInput


def test_steps_that_bfloat16_would_round_away_add_up() -> None:
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    assert (weight + 1e-4).equal(weight)
    masters = Masters({"w": weight}, lr=1e-4)
    for _ in range(100):
        masters.step("w", torch.ones(2, 2))
    torch.testing.assert_close(masters["w"], torch.full((2, 2), 1.01))
    assert weight.equal(torch.full((2, 2), 1.01).to(torch.bfloat16))
    assert not weight.equal(torch.ones(2, 2, dtype=torch.bfloat16))


def test_a_float32_weight_is_its_own_master() -> None:
    weight = torch.zeros(3)
    masters = Masters({"w": weight}, lr=0.5)
    change = masters.step("w", torch.ones(3))
    assert masters["w"].data_ptr() == weight.data_ptr()
    assert weight.tolist() == [0.5] * 3
    assert float(change.moved) == pytest.approx(0.75)
    assert float(change.weights) == pytest.approx(0.75)


def test_a_transposed_view_moves_with_its_storage() -> None:
    stored = torch.zeros(2, 3)
    Masters({"w": stored.mT}, lr=1.0).step("w", torch.arange(6.0).view(3, 2))
    assert stored.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_streamed_steps_equal_torchs_optimizer(kind: str) -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    reference = make(parameters.values(), lr=0.1, weight_decay=0.01)
    masters = Masters(start, lr=0.1, optimizer=kind, weight_decay=0.01)  # type: ignore[arg-type]
    for _ in range(3):
        ascents = {name: torch.randn_like(value) for name, value in start.items()}
        for name, parameter in parameters.items():
            parameter.grad = -ascents[name]
        reference.step()
        for name, ascent in ascents.items():
            masters.step(name, ascent)
    for name, parameter in parameters.items():
        assert masters[name].equal(parameter.detach())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ascents = torch.randn(4, 3, 3)
    first = Masters({"w": torch.ones(3, 3, dtype=dtype)}, lr=0.1, optimizer=kind)  # type: ignore[arg-type]
    for ascent in ascents[:2]:
        first.step("w", ascent)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    weight = torch.zeros(3, 3, dtype=dtype)
    second = Masters({"w": weight}, lr=0.1, optimizer=kind)  # type: ignore[arg-type]
    second.load(saved)
    for ascent in ascents[2:]:
        first.step("w", ascent)
        second.step("w", ascent)
    assert second["w"].equal(first["w"])
    assert weight.equal(first["w"].to(dtype))


def test_a_state_of_other_shapes_is_refused() -> None:
    saved = Masters({"w": torch.ones(2, 2)}, lr=0.1).tensors()
    with pytest.raises(BadInput, match=r"\(2, 2\), the model as \(3, 3\)"):
        Masters({"w": torch.ones(3, 3)}, lr=0.1).load(saved)
    with pytest.raises(BadInput, match="v as None"):
        Masters({"v": torch.ones(2, 2)}, lr=0.1).load(saved)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(BadInput, match="sgd, adamw"):
        Masters({"w": torch.ones(2)}, lr=0.1, optimizer="lion")  # type: ignore[arg-type]


def test_the_place_says_why() -> None:
    weights = {"w": torch.ones(2)}
    assert choose_place(weights, optimizer="sgd").reason == "the model is on the CPU"
    assert choose_place(weights, optimizer="sgd", place="cpu").reason == "as asked"
