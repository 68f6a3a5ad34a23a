"""The packed encoder: the plain model without adapters, each adapter's model with them, PEFT's for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.encoder import PackedEncoder, pool_rows
from flatout.engines.adapters.lora.token_blocks import TokenBlock, block_of
from flatout.ground.errors import BadInput
from flatout.multiplex.products.ranges import Path
from tests.support.adapters_packed import (
    PAD,
    WIDTH,
    alone,
    bert,
    blocks,
    difference,
    filled,
    gradients_alone,
    gradients_of,
    plain_states,
    roberta,
    specs,
)

MODELS = pytest.mark.parametrize("make", [bert, roberta])


def mean_square(states: Tensor, block: TokenBlock) -> Tensor:
    """A loss that reads every real token and no padding."""
    weights = torch.linspace(0.5, 2.0, states.shape[-1]) * block.mask()[..., None]
    return (states * weights).pow(3).mean()


# Without adapters


@MODELS
def test_without_adapters_it_is_the_plain_model(make: Callable[[], Any]) -> None:
    model = make()
    given = blocks()
    expected = [plain_states(model, block) for block in given]
    with PackedEncoder(model, filled(AdapterBank(model, specs()))) as encoder:
        for ours, theirs, block in zip(encoder(given, adapters=False), expected, given, strict=True):
            assert ours.shape == (block.num_rows, block.length, WIDTH)
            assert difference(ours, theirs, block) < 1e-5
        assert difference(plain_states(model, given[0]), expected[0], given[0]) == 0  # called by others


@MODELS
def test_one_block_without_adapters_has_the_bits_of_the_plain_model(make: Callable[[], Any]) -> None:
    model = make()
    (block,) = blocks(((4, 9),))
    expected = plain_states(model, block)
    with PackedEncoder(model, AdapterBank(model, specs())) as encoder:
        (states,) = encoder((block,), adapters=False)
    assert difference(states, expected, block) == 0


def test_other_encoders_are_packed_by_the_names_of_their_own_maps() -> None:
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(0)
    model: Any = DistilBertModel(
        DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=97, pad_token_id=PAD)
    ).eval()
    targets = ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2")
    bank = filled(AdapterBank(model, specs(targets=targets)))
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        states = encoder(blocks())
    for name, block, ours in zip(bank.names, blocks(), states, strict=True):
        own = alone(model, bank, name)
        theirs = own(input_ids=block.ids, attention_mask=block.mask().long()).last_hidden_state
        assert difference(ours, theirs, block) < 1e-5


def test_adapters_that_did_not_learn_yet_change_nothing() -> None:
    model = bert()
    with PackedEncoder(model, AdapterBank(model, specs())) as encoder:
        for fresh, plain in zip(encoder(blocks()), encoder(blocks(), adapters=False), strict=True):
            assert fresh.equal(plain)


def test_token_types_are_heeded() -> None:
    model = bert()
    given = blocks(types=True)
    with PackedEncoder(model, None) as encoder:
        mixed = (given[0], blocks()[1])
        for ours, block in zip(encoder(mixed), mixed, strict=True):
            assert difference(ours, plain_states(model, block), block) < 1e-5
        assert difference(encoder(given[:1])[0], encoder(blocks()[:1])[0], given[0]) > 1e-2


@settings(max_examples=10)
@given(extra=st.integers(0, 9), more_rows=st.integers(0, 3))
def test_padding_changes_no_row(extra: int, more_rows: int) -> None:
    import numpy as np

    model = roberta(num_layers=1)
    bank = filled(AdapterBank(model, specs((8, 16))))
    texts = [np.arange(5, 11), np.arange(20, 23)]
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        (tight,) = encoder((block_of(texts, adapter=1, pad_id=PAD),))
        (loose,) = encoder(
            (block_of(texts, adapter=1, pad_id=PAD, length_multiple=6 + extra, row_multiple=2 + more_rows),)
        )
    torch.testing.assert_close(loose[0, :6], tight[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loose[1, :3], tight[1, :3], rtol=1e-5, atol=1e-5)


# With adapters


@pytest.mark.parametrize("path", ["loop", "dense", "grouped"])
@MODELS
def test_together_each_adapter_is_trained_as_if_alone(make: Callable[[], Any], path: Path) -> None:
    """Mixed ranks, scales and shapes; states and every gradient."""
    model = make()
    bank = filled(AdapterBank(model, specs()))
    given = blocks()
    with PackedEncoder(model, bank, path=path) as encoder:
        states = encoder(given)
        torch.stack([mean_square(s, b) for s, b in zip(states, given, strict=True)]).sum().backward()
    for name, block, ours in zip(bank.names, given, states, strict=True):
        own = alone(model, bank, name)
        theirs = plain_states(own, block)
        assert difference(ours.detach(), theirs.detach(), block) < 1e-5
        mean_square(theirs, block).backward()
        expected, found = gradients_alone(own), gradients_of(bank, name)
        assert found.keys() == expected.keys() and len(found) == 2 * len(bank.sites)
        for key, gradient in expected.items():
            assert gradient.abs().max() > 0, f"{key} receives no gradient"
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)


def test_equal_blocks_in_one_batched_product_are_the_same() -> None:
    model = bert()
    bank = filled(AdapterBank(model, specs()))
    given = blocks(((2, 6), (3, 4), (1, 12)))
    found = {}
    paths: tuple[Path, ...] = ("loop", "batched")
    for path in paths:
        with PackedEncoder(model, bank, path=path) as encoder:
            bank.zero_gradients()
            states = encoder(given)
            torch.stack([mean_square(s, b) for s, b in zip(states, given, strict=True)]).sum().backward()
            found[path] = (torch.cat([s.detach().flatten() for s in states]), bank.gradients.clone())
    torch.testing.assert_close(found["loop"], found["batched"], rtol=1e-4, atol=1e-5)


def test_every_factor_changes_the_output() -> None:
    """The fault of adapters that are defined and never applied cannot come back."""
    model = bert()
    bank = filled(AdapterBank(model, specs((4, 8))))
    given = blocks(((2, 6), (2, 5)))
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        before = encoder(given)
        for site in bank.sites.values():
            for part in (site.shrink, site.expand):
                kept = bank.factors[0, :, part].clone()
                bank.factors[0, :, part] *= 3
                changed, untouched = encoder(given)
                bank.factors[0, :, part] = kept
                assert not changed.allclose(before[0], atol=1e-4), f"{site.name} is not applied"
                assert untouched.equal(before[1])  # a stranger's adapter is nothing to these rows


def test_a_finished_adapter_leaves_and_the_others_do_not_notice() -> None:
    model = bert()
    bank = filled(AdapterBank(model, specs()))
    given = blocks()
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        every = encoder(given)
        some = encoder((given[0], given[2]))
    torch.testing.assert_close(some[0], every[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(some[1], every[2], rtol=1e-5, atol=1e-5)


def test_one_adapter_may_serve_several_blocks() -> None:
    model = bert()
    bank = filled(AdapterBank(model, specs()))
    first, second, _ = blocks()
    same = TokenBlock(adapter=0, ids=second.ids, lengths=second.lengths)
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        ours = encoder((first, same))
        assert difference(ours[1], plain_states(alone(model, bank, "a"), same), same) < 1e-5


# Mixtures


def test_a_mixture_of_one_is_that_adapter_and_has_a_gradient_to_its_weights() -> None:
    model = bert()
    bank = filled(AdapterBank(model, specs()))
    given = blocks()
    chosen = torch.cat([torch.full((b.num_rows,), b.adapter) for b in given])
    with PackedEncoder(model, bank) as encoder:
        with torch.no_grad():
            expected = encoder(given)
        weights = torch.nn.functional.one_hot(chosen, 3).float().requires_grad_()
        mixed = encoder(given, mixture=weights)
        for ours, theirs in zip(mixed, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        mean_square(mixed[0], given[0]).backward()
        assert weights.grad is not None
        rows = given[0].num_rows
        assert weights.grad[:rows].ne(0).all() and not weights.grad[rows:].any()
        assert bank.gradients[0].any()
        step = 1e-2
        with torch.no_grad():
            moved = weights.detach().clone()
            moved[0, 1] += step
            after = mean_square(encoder(given, mixture=moved)[0], given[0])
            moved[0, 1] -= 2 * step
            before = mean_square(encoder(given, mixture=moved)[0], given[0])
        assert weights.grad[0, 1].item() == pytest.approx((after - before).item() / (2 * step), rel=0.02)


def test_a_mixture_of_another_size_is_refused() -> None:
    model = bert()
    with (
        PackedEncoder(model, AdapterBank(model, specs())) as encoder,
        pytest.raises(BadInput, match="9 rows"),
    ):
        encoder(blocks(), mixture=torch.ones(9, 2))


# Dropout and precision


def test_dropout_is_the_adapters_alone_and_only_where_asked_for() -> None:
    model = bert()
    given = blocks()
    bank = filled(AdapterBank(model, specs(dropout=0.5)))
    with PackedEncoder(model, bank) as encoder, torch.no_grad():
        plain = encoder(given)[0]
        assert plain.equal(encoder(given)[0])
        torch.manual_seed(0)
        dropped = encoder(given, dropout=True)[0]
        assert not dropped.allclose(plain, atol=1e-3)
        assert not dropped.equal(encoder(given, dropout=True)[0])
        torch.manual_seed(0)
        assert dropped.equal(encoder(given, dropout=True)[0])
        assert encoder(given, dropout=True, adapters=False)[0].equal(encoder(given, adapters=False)[0])


def test_bfloat16_stays_near_float32() -> None:
    model = bert()
    given = blocks()
    exact = filled(AdapterBank(model, specs()))
    with PackedEncoder(model, exact) as encoder:
        states = encoder(given)
        torch.stack([mean_square(s, b) for s, b in zip(states, given, strict=True)]).sum().backward()
    half = filled(AdapterBank(model, specs(), dtype=torch.bfloat16))
    with PackedEncoder(model, half, dtype=torch.bfloat16) as encoder:
        rough = encoder(given)
        torch.stack([mean_square(s.float(), b) for s, b in zip(rough, given, strict=True)]).sum().backward()
    assert rough[0].dtype == torch.bfloat16 and half.gradients.dtype == torch.float32
    for number in range(3):
        ours, theirs = half.gradients[number].flatten(), exact.gradients[number].flatten()
        assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.98


# The model, before and after


def test_a_closed_encoder_gives_the_model_back() -> None:
    model = bert()
    model.train()
    pooler, forward = model.pooler, model.encoder.layer[0].output.dense.forward
    attention = model.config._attn_implementation
    encoder = PackedEncoder(model, AdapterBank(model, specs()))
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training
    encoder(blocks())
    encoder.close()
    assert model.pooler is pooler and model.training
    assert model.encoder.layer[0].output.dense.forward == forward
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == attention
    encoder.close()  # twice is once


def test_the_base_is_untouched_by_training() -> None:
    model = bert()
    bank = filled(AdapterBank(model, specs()))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with PackedEncoder(model, bank) as encoder:
        encoder(blocks())[0].sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_a_second_encoder_on_an_open_model_is_refused() -> None:
    model = bert()
    with (
        PackedEncoder(model, AdapterBank(model, specs())),
        pytest.raises(BadInput, match="close the first encoder"),
    ):
        PackedEncoder(model, AdapterBank(model, specs()))


def test_a_bank_of_another_precision_or_model_is_refused() -> None:
    with pytest.raises(BadInput, match="same dtype"):
        PackedEncoder(bert(), AdapterBank(bert(), specs(), dtype=torch.bfloat16))
    small = bert(num_layers=1)
    with pytest.raises(BadInput, match="made for another model"):
        PackedEncoder(small, AdapterBank(bert(), specs()))
    assert not any("forward" in vars(module) for module in small.modules())  # left as it was
    assert small.pooler is not None and all(one.requires_grad for one in small.parameters())
    model = bert()
    with (
        PackedEncoder(model, AdapterBank(model, specs())) as encoder,
        pytest.raises(BadInput, match="holds 3"),
    ):
        encoder((TokenBlock(adapter=3, ids=blocks()[0].ids, lengths=blocks()[0].lengths),))


def test_an_encoder_that_cannot_be_packed_is_refused_and_left_as_it_was() -> None:
    """Relative positions span the whole pack."""
    from transformers import MPNetConfig, MPNetModel

    model = MPNetModel(
        MPNetConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=97
        )
    ).eval()
    targets = ("attn.q", "attn.v")
    with pytest.raises(BadInput, match="BERT"):
        PackedEncoder(model, AdapterBank(model, [AdapterSpec(name="a", rank=4, targets=targets)]))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "forward" not in vars(model.encoder.layer[0].attention.attn.q)


@pytest.mark.parametrize(("make", "longest"), [(bert, 40), (roberta, 38)])
def test_a_row_longer_than_the_positions_is_refused_before_it_is_looked_up(make: Any, longest: int) -> None:
    model = make(num_layers=1)
    with PackedEncoder(model, None) as encoder, torch.no_grad():
        assert encoder(blocks(((1, longest),)))[0].isfinite().all()
        with pytest.raises(BadInput, match=f"positions for {longest}"):
            encoder(blocks(((1, longest + 1),)))


def test_shapes_are_prepared_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.engines.adapters.lora.encoder.KEPT_FRAMES", 2)
    model = bert(num_layers=1)
    with PackedEncoder(model, AdapterBank(model, specs())) as encoder:
        encoder(blocks())
        first = encoder.prepare(tuple(encoder._plans)[-1])
        encoder(blocks(seed=5))
        assert encoder.prepare(first.frame.shapes) is first
        assert first.path is not None and first.path.value == "loop"
        for length in (4, 5, 6):
            encoder(blocks(((1, length),)))
        assert len(encoder._plans) == 2


def test_rank_zero_is_the_plain_model() -> None:
    model = bert()
    with PackedEncoder(model, AdapterBank(model, specs((0, 0, 0)))) as encoder:
        for ours, block in zip(encoder(blocks()), blocks(), strict=True):
            assert difference(ours, plain_states(model, block), block) < 1e-5


def test_pooled_is_the_mean_of_real_tokens() -> None:
    states = torch.randn(3, 5, 4)
    lengths = torch.tensor([5, 2, 1])
    expected = torch.stack([states[row, :length].mean(0) for row, length in enumerate(lengths.tolist())])
    torch.testing.assert_close(pool_rows(states, lengths), expected)


@torch.no_grad()
def test_depths_are_the_plain_models_hidden_states() -> None:
    with PackedEncoder(bert(), None) as encoder:
        block = blocks()[0]
        found = encoder.depths(block)
        for row, length in enumerate(block.lengths.tolist()):
            plain = encoder.model(input_ids=block.ids[row : row + 1, :length], output_hidden_states=True)
            for ours, theirs in zip(found, plain.hidden_states, strict=True):
                torch.testing.assert_close(ours[row, :length], theirs[0], rtol=1e-4, atol=1e-5)


def test_the_encoder_finds_query_key_and_value_by_itself() -> None:
    names = [f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    model = bert()
    with PackedEncoder(model, AdapterBank(model, specs()), path="dense") as encoder:
        assert [group.names for group in encoder._groups] == [
            names,
            [name.replace("layer.0", "layer.1") for name in names],
        ]
        encoder(blocks())
        assert all(group.maps is not None and group.x is None for group in encoder._groups)
