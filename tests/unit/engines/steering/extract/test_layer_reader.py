"""Batched equals single: padding on either side, forks through the cache, early exit at any layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.steering.extract.layer_reader import Columns, Fork, LayerReader
from tests.support.multiplex import FAMILIES, prompts_of, shared_model, tiny_model

LENGTHS = (3, 11, 1, 17, 8)  # longer than the windows of the windowed families
CPU = torch.device("cpu")
SIDES: tuple[Literal["right", "left"], ...] = ("right", "left")


@torch.no_grad()
def hidden_states(model: Any, tokens: Sequence[int]) -> Tensor:
    """[layers, tokens, width] of one unpadded text, from hooks: the last one in the output is normed."""
    found: list[Tensor] = []
    stack = model.transformer.h if hasattr(model, "transformer") else model.base_model.layers
    hooks = [
        block.register_forward_hook(
            lambda _, __, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in stack
    ]
    model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return torch.cat(found)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_row_of_a_padded_batch_equals_the_text_alone(family: str, side: Literal["right", "left"]) -> None:
    model, prompts = shared_model(family), prompts_of(LENGTHS)
    ranges = [(len(prompt) - 1, len(prompt)) for prompt in prompts]
    batched = LayerReader(model, layers=(0, 1)).read(prompts, ranges=ranges, side=side)
    alone = torch.stack([hidden_states(model, prompt)[:, -1] for prompt in prompts])
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_pass_never_asks_the_device_whether_texts_are_packed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", asked.append)
    model, prompts = shared_model(family), prompts_of(LENGTHS)
    LayerReader(model, layers=(0, 1)).read(prompts, ranges=[(0, 1)] * len(prompts))
    assert not asked
    model(torch.tensor([[5, 6, 7]]), use_cache=False)
    assert asked  # the question is still there to be avoided


@pytest.mark.parametrize("side", SIDES)
def test_the_mean_of_a_padded_row_leaves_out_its_padding(side: Literal["right", "left"]) -> None:
    model, prompts = shared_model("gpt2"), prompts_of(LENGTHS)
    ranges = [(0, len(prompt)) for prompt in prompts]
    batched = LayerReader(model, layers=(1,)).read(prompts, ranges=ranges, side=side)
    alone = torch.stack([hidden_states(model, prompt)[1].mean(0) for prompt in prompts])
    torch.testing.assert_close(batched[:, 0], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_endings_of_one_prefix_equal_the_whole_texts(family: str) -> None:
    model = shared_model(family)
    reader = LayerReader(model, layers=(0, 1))
    assert reader.can_fork
    endings = prompts_of((2, 1, 4, 2, 1, 3), seed=5)
    forks, whole, ranges = [], [], []
    for number, prefix in enumerate(prompts_of((12, 5, 1))):
        pair = (endings[2 * number], endings[2 * number + 1])
        texts = [prefix + ending for ending in pair]
        wanted = [(len(text) - 1, len(text)) for text in texts]
        forks.append(Fork(prefix=prefix, endings=pair, ranges=(wanted[0], wanted[1])))
        whole += texts
        ranges += wanted
    torch.testing.assert_close(
        reader.read_forks(forks), reader.read(whole, ranges=ranges), rtol=1e-4, atol=1e-4
    )


def test_a_pass_stops_after_the_last_wanted_block_and_leaves_no_hook() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    ran: list[str] = []
    watched = {"block 1": model.model.layers[1], "block 2": model.model.layers[2], "head": model.lm_head}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in watched.items()
    ]
    values = LayerReader(model, layers=(0, 1)).read([(5, 6)], ranges=[(1, 2)])
    assert values.shape == (1, 2, 48)
    assert ran == ["block 1"]
    for hook in hooks:
        hook.remove()
    assert not any(module._forward_hooks for module in model.modules())
    assert not values.requires_grad


def test_an_error_of_the_model_leaves_no_hook() -> None:
    model = tiny_model("llama")
    with pytest.raises(IndexError):
        LayerReader(model, layers=(0,)).read([(5, 10_000)], ranges=[(1, 2)])
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_a_plain_cache_cannot_fork() -> None:
    model = tiny_model("llama")
    model.forward = lambda input_ids: None
    assert not LayerReader(model, layers=(0,)).can_fork


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), left=st.booleans(), data=st.data())
def test_what_is_read_is_the_mean_over_the_wanted_tokens(lengths: list[int], left: bool, data: Any) -> None:
    width = max(lengths)
    ranges, offsets = [], []
    for length in lengths:
        first = data.draw(st.integers(0, length - 1))
        ranges.append((first, data.draw(st.integers(first + 1, length))))
        offsets.append(width - length if left else 0)
    hidden = torch.randn(len(lengths), width, 3)
    for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        hidden[row, :offset] = torch.nan
        hidden[row, offset + length :] = torch.nan
    found = Columns.of(ranges, offsets=offsets, device=CPU).read(hidden)
    expected = [
        hidden[row, offset + first : offset + last].mean(0)
        for row, ((first, last), offset) in enumerate(zip(ranges, offsets, strict=True))
    ]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_mean_in_half_precision_neither_overflows_nor_loses_digits() -> None:
    hidden = torch.full((1, 512, 1), 1000.0, dtype=torch.float16)
    columns = Columns.of([(0, 512)], offsets=[0], device=CPU)
    assert columns.read(hidden).item() == 1000.0
    assert columns.read(hidden).dtype == torch.float16
    ones = torch.ones(1, 512, 1, dtype=torch.bfloat16)  # a running sum in bf16 stops growing at 256
    assert columns.read(ones).item() == 1.0
