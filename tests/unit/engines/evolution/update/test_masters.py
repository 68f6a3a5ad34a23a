"""Small steps add up in fp32, the optimizer is torch's, and a resumed one goes on bit for bit."""

from __future__ import annotations

import pytest
import torch

from flatout.engines.evolution.update.masters import Masters, choose_place
from flatout.ground.errors import BadInput


def test_steps_that_bfloat16_would_round_away_add_up() -> None:
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    assert (weight + 1e-4).equal(weight)
    masters = Masters({"w": weight}, stacks=[("w",)], lr=1e-4)
    for _ in range(100):
        masters.step(("w",), torch.ones(1, 2, 2))
    torch.testing.assert_close(masters["w"], torch.full((2, 2), 1.01))
    assert weight.equal(torch.full((2, 2), 1.01).to(torch.bfloat16))
    assert not weight.equal(torch.ones(2, 2, dtype=torch.bfloat16))


def test_a_float32_weight_is_its_own_master() -> None:
    weight = torch.zeros(3)
    masters = Masters({"w": weight}, stacks=[("w",)], lr=0.5)
    squares = masters.step(("w",), torch.ones(1, 3))
    assert masters["w"].data_ptr() == weight.data_ptr()
    assert weight.tolist() == [0.5] * 3
    assert squares.tolist() == pytest.approx([3.0, 0.75, 0.75])


def test_a_transposed_view_moves_with_its_storage() -> None:
    stored = torch.zeros(2, 3)
    Masters({"w": stored.mT}, stacks=[("w",)], lr=1.0).step(("w",), torch.arange(6.0).view(1, 3, 2))
    assert stored.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_streamed_steps_equal_torchs_optimizer(kind: str) -> None:
    torch.manual_seed(0)
    start = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(3, 4)}
    stacks = [("a", "c"), ("b",)]
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    reference = make(parameters.values(), lr=0.1, weight_decay=0.01)
    masters = Masters(start, stacks=stacks, lr=0.1, optimizer=kind, weight_decay=0.01)  # type: ignore[arg-type]
    for _ in range(3):
        ascents = {name: torch.randn_like(value) for name, value in start.items()}
        for name, parameter in parameters.items():
            parameter.grad = -ascents[name]
        reference.step()
        before = {name: masters[name].clone() for name in start}
        for names in stacks:
            ascent = torch.stack([ascents[name] for name in names])
            move = torch.stack([masters[name] for name in names])
            squares = masters.step(names, ascent)
            move = move - torch.stack([masters[name] for name in names])
            weights = torch.stack([masters[name] for name in names])
            wanted = [float(each.square().sum()) for each in (ascent, move, weights)]
            assert squares.tolist() == pytest.approx(wanted, rel=1e-4)
        assert all(not masters[name].equal(before[name]) for name in start)
    for name, parameter in parameters.items():
        assert masters[name].equal(parameter.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_moves_as_its_matrices_do_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = {name: torch.randn(3, 4).to(dtype) for name in "abc"}
    ascent = torch.randn(3, 3, 4)
    together, apart = ({name: weight.clone() for name, weight in start.items()} for _ in range(2))
    Masters(together, stacks=[tuple(start)], lr=0.3).step(tuple(start), ascent)
    alone = Masters(apart, stacks=[(name,) for name in start], lr=0.3)
    for number, name in enumerate(start):
        alone.step((name,), ascent[number][None])
    assert all(together[name].equal(apart[name]) and not apart[name].equal(start[name]) for name in start)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ascents = torch.randn(4, 3, 3)
    first = Masters({"w": torch.ones(3, 3, dtype=dtype)}, stacks=[("w",)], lr=0.1, optimizer=kind)  # type: ignore[arg-type]
    for ascent in ascents[:2]:
        first.step(("w",), ascent[None])
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    weight = torch.zeros(3, 3, dtype=dtype)
    second = Masters({"w": weight}, stacks=[("w",)], lr=0.1, optimizer=kind)  # type: ignore[arg-type]
    second.load(saved)
    for ascent in ascents[2:]:
        first.step(("w",), ascent[None])
        second.step(("w",), ascent[None])
    assert second["w"].equal(first["w"])
    assert weight.equal(first["w"].to(dtype))


def test_a_state_of_other_shapes_is_refused() -> None:
    saved = Masters({"w": torch.ones(2, 2)}, stacks=[("w",)], lr=0.1).tensors()
    with pytest.raises(BadInput, match=r"\(2, 2\), the model as \(3, 3\)"):
        Masters({"w": torch.ones(3, 3)}, stacks=[("w",)], lr=0.1).load(saved)
    with pytest.raises(BadInput, match="v as None"):
        Masters({"v": torch.ones(2, 2)}, stacks=[("v",)], lr=0.1).load(saved)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(BadInput, match="sgd, adamw"):
        Masters({"w": torch.ones(2)}, stacks=[("w",)], lr=0.1, optimizer="lion")  # type: ignore[arg-type]


def test_the_place_says_why() -> None:
    weights = {"w": torch.ones(2)}
    assert choose_place(weights, optimizer="sgd").reason == "the model is on the CPU"
    assert choose_place(weights, optimizer="sgd", place="cpu").reason == "as asked"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_state_from_a_file_goes_on_bit_for_bit_on_a_gpu(kind: str) -> None:
    """What a file gives lies on the CPU, whatever it was saved from."""
    names = ("v", "w")
    ascents = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    runs = [
        Masters(
            {name: torch.ones(8, 8, dtype=torch.bfloat16, device="cuda") for name in names},
            stacks=[names],
            lr=0.1,
            optimizer=kind,  # type: ignore[arg-type]
            place="device",
        )
        for _ in range(2)
    ]
    for ascent in ascents[:2]:
        runs[0].step(names, ascent)
    runs[1].load({name: tensor.cpu() for name, tensor in runs[0].tensors().items()})
    for ascent in ascents[2:]:
        for masters in runs:
            masters.step(names, ascent)
    assert all(runs[0][name].equal(runs[1][name]) for name in names)
