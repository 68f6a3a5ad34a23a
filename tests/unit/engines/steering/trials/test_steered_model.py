from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engines.steering.model_blocks import blocks_of
from flatout.engines.steering.settings import Mode, Where
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import MODES, WHERE, Steering
from flatout.ground.errors import BadInput
from tests.support.multiplex import FAMILIES, prompts_of, reference_tokens, shared_model

WIDTH = 48


def direction(seed: int = 0) -> Tensor:
    drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


def steering(
    layer: int = 0,
    amount: float = 3.0,
    *,
    mode: Mode = "add",
    where: Where = "last-and-generated",
    seed: int = 0,
) -> Steering:
    return Steering(layer=layer, direction=direction(seed), amount=amount, mode=mode, where=where)


def batch(prompts: Sequence[tuple[int, ...]], *, side: str = "left") -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        here = slice(longest - len(prompt), longest) if side == "left" else slice(0, len(prompt))
        ids[row, here], mask[row, here] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def hidden_after(model: Any, layer: int, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What a layer gives to the next, steering included."""
    found: list[Tensor] = []
    hook = blocks_of(model)[layer].register_forward_hook(
        lambda module, args, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    with hook:
        model(**inputs, position_ids=positions_of(inputs["attention_mask"]), **options)
    return found[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", WHERE)
def test_a_cache_changes_nothing(mode: Mode, where: Where) -> None:
    model = shared_model()
    inputs = batch(prompts_of([6, 6, 6]))
    rows = [steering(1, 4.0, mode=mode, where=where), None, steering(0, 2.0, mode=mode, where=where, seed=1)]
    told = {**inputs, "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad(), steered_model(model, rows):
        cached, whole = (model.generate(**told, use_cache=cache) for cache in (True, False))
    plain = model.generate(**told)
    assert torch.equal(cached, whole)
    assert torch.equal(cached[1], plain[1])
    assert not torch.equal(cached, plain)


def test_a_batch_of_different_rows_is_each_row_alone() -> None:
    model = shared_model()
    prompts = prompts_of([3, 9, 5, 7])
    rows = [
        steering(0, 4.0, where="all"),
        steering(1, 3.0, mode="clamp", where="generated", seed=1),
        None,
        steering(1, 5.0, mode="norm-preserving", seed=2),
    ]
    with steered_model(model, rows):
        together = model.generate(**batch(prompts), max_new_tokens=8, do_sample=False)[:, 9:]
    for prompt, row, tokens in zip(prompts, rows, together.tolist(), strict=True):
        with steered_model(model, [row]):
            assert tuple(tokens) == reference_tokens(model, prompt, max_new_tokens=8)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", WHERE)
def test_the_right_tokens_are_steered(where: Where, side: str) -> None:
    model, prompts = shared_model(), prompts_of([4, 7])
    inputs = batch(prompts, side=side)
    plain = hidden_after(model, 0, inputs)
    with steered_model(model, steering(where=where)):
        moved = hidden_after(model, 0, inputs)
    touched = (moved != plain).any(-1)
    real = inputs["attention_mask"].bool()
    last = torch.where(real, torch.arange(7), -1).amax(1)[:, None]
    expected = {
        "all": real,
        "generated": torch.zeros_like(real),
        "last-and-generated": torch.arange(7)[None] == last,
    }
    assert torch.equal(touched, expected[where])
    with steered_model(model, steering(where=where), prompt_lengths=[2, 3]):
        told = (hidden_after(model, 0, inputs) != plain).any(-1)
    number = real.cumsum(1)
    first = torch.tensor([[2], [3]])
    expected = {
        "all": real,
        "generated": real & (number > first),
        "last-and-generated": real & (number >= first),
    }
    assert torch.equal(told, expected[where])


def test_another_prompt_begins_anew() -> None:
    model = shared_model()
    short, long = (batch([prompt]) for prompt in prompts_of([4, 9]))
    with steered_model(model, steering()):
        hidden_after(model, 0, short)
        moved = hidden_after(model, 0, long)
    assert (moved != hidden_after(model, 0, long)).any(-1).tolist() == [[False] * 8 + [True]]


def test_nothing_added_is_the_plain_model() -> None:
    model = shared_model()
    (prompt,) = prompts_of([9])
    for where in WHERE:
        with steered_model(model, steering(amount=0.0, where=where)):
            tokens = reference_tokens(model, prompt, max_new_tokens=10)
        assert tokens == reference_tokens(model, prompt, max_new_tokens=10)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_steered(family: str) -> None:
    model = shared_model(family)
    inputs = batch(prompts_of([5]))
    with steered_model(model, steering(1, 2.0)):
        moved = hidden_after(model, 1, inputs)
    difference = moved - hidden_after(model, 1, inputs)
    torch.testing.assert_close(difference[0, -1], 2 * direction(), atol=1e-4, rtol=1e-4)
    assert not difference[0, :-1].any()


def test_hooks_hold_no_graph_and_leave_no_trace() -> None:
    model = shared_model()
    leaf = direction().requires_grad_()
    made = leaf * 2
    graph = weakref.ref(made)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    before = [dict(module._forward_pre_hooks) for module in model.modules()]
    inputs = batch(prompts_of([5]))
    one = Steering(layer=1, direction=made, amount=1.0)
    del made
    with torch.enable_grad(), steered_model(model, one):
        hidden_after(model, 1, inputs)
        gc.collect()
        assert graph() is None
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == before
    with pytest.raises(RuntimeError, match="in the block"), steered_model(model, one):
        raise RuntimeError("in the block")
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks


def test_no_gradient_reaches_a_direction() -> None:
    model = shared_model()
    leaf = direction().requires_grad_()
    with steered_model(model, Steering(layer=0, direction=leaf, amount=1.0)):
        out = model(**batch(prompts_of([5])))
    out.logits.sum().backward()
    assert leaf.grad is None
    model.zero_grad(set_to_none=True)


def test_what_cannot_be_steered_is_named() -> None:
    model, inputs = shared_model(), batch(prompts_of([5, 5]))
    with (
        pytest.raises(BadInput, match=r"no layer 2 to steer .*layers 0 to 1"),
        steered_model(model, steering(2)),
    ):
        pass
    with (
        pytest.raises(BadInput, match=r"2 rows, but there are 3 steerings"),
        steered_model(model, [steering()] * 3),
    ):
        model(**inputs)
    narrow = Steering(layer=0, direction=direction()[:-1], amount=1.0)
    for given in (narrow, [steering(), narrow]):
        with (
            pytest.raises(BadInput, match=f"the vector is {WIDTH - 1} wide and the model is {WIDTH} wide"),
            steered_model(model, given),
        ):
            pass
    with pytest.raises(BadInput, match="list of steerings is empty"), steered_model(model, []):
        pass
    with (
        pytest.raises(BadInput, match="1 prompt lengths for 2 rows"),
        steered_model(model, steering(), prompt_lengths=[3]),
    ):
        model(**inputs)
