from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.ground.errors import BadInput
from flatout.multiplex.decode import forward
from flatout.multiplex.decode.cache import Cache
from flatout.multiplex.decode.generator import generate
from flatout.multiplex.models.decoder import Decoder, Norm
from flatout.multiplex.models.families import FAMILIES, read_decoder
from flatout.multiplex.rows import Rows
from tests.support.multiplex import FAMILIES as TINY
from tests.support.multiplex import (
    prompts_of,
    reference_logits,
    reference_tokens,
    shared_model,
    tiny_model,
)

LENGTHS = (5, 1, 17, 30, 9, 2, 70)
NEW_TOKENS = 16


def test_every_family_is_tested() -> None:
    assert {shared_model(name).config.model_type for name in TINY} == set(FAMILIES)


@pytest.mark.parametrize("family", TINY)
def test_tokens_equal_those_of_transformers(family: str) -> None:
    model = shared_model(family)
    prompts = prompts_of(LENGTHS)
    wanted = [list(reference_tokens(model, prompt, max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    assert len({tuple(tokens) for tokens in wanted}) > 3
    assert generate(model, prompts, max_new_tokens=NEW_TOKENS, slots=3) == wanted


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_logits_equal_those_of_transformers(family: str) -> None:
    model = shared_model(family)
    (prompt,) = prompts_of([40])
    decoder = read_decoder(model)
    x = forward.embed(decoder, torch.tensor([prompt]), torch.arange(40)[None])
    x = forward.run_blocks(
        decoder,
        x,
        Cache.empty(decoder, slots=1, max_tokens=40),
        forward.fresh_places(decoder, slots=torch.tensor([0]), num_tokens=40),
        Rows.plain(1).tables(),
        forward.deltas_of(decoder, {}),
    )
    torch.testing.assert_close(
        forward.logits_of(decoder, x[0]), reference_logits(model, prompt), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("family", TINY)
def test_the_model_is_the_same_after_reading(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = reference_logits(model, range(3, 20))
    read_decoder(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(reference_logits(model, range(3, 20)), logits, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def norms_of(decoder: Decoder) -> list[Norm]:
    found = [decoder.norm]
    for block in decoder.blocks:
        attention = block.attention
        branches = (block.attention_out_norm, block.mlp_out_norm, attention.q_norm, attention.k_norm)
        found += [block.attention_norm, block.mlp_norm, *(norm for norm in branches if norm is not None)]
    return found


@pytest.mark.parametrize("family", TINY)
def test_no_weight_exists_twice(family: str) -> None:
    model = tiny_model(family)
    decoder = read_decoder(model)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    holders = [*decoder.projections().values(), decoder.head, *norms_of(decoder)]
    assert {holder.weight.untyped_storage().data_ptr() for holder in holders} <= storages
    again = read_decoder(model).projections()
    assert all(
        again[name].weight.data_ptr() == one.weight.data_ptr() for name, one in decoder.projections().items()
    )


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_a_change_of_the_decoder_is_a_change_of_the_model(family: str) -> None:
    model = tiny_model(family)
    decoder = read_decoder(model)
    generator = torch.Generator().manual_seed(3)
    for holder in (*decoder.projections().values(), *norms_of(decoder)):
        holder.weight.add_(torch.randn(holder.weight.shape, generator=generator) * 0.05)
    prompts = prompts_of([5, 12])
    wanted = [list(reference_tokens(model, prompt, max_new_tokens=8)) for prompt in prompts]
    assert generate(decoder, prompts, max_new_tokens=8) == wanted
    assert wanted != generate(shared_model(family), prompts, max_new_tokens=8)


def test_products_are_named_after_their_modules() -> None:
    names = list(read_decoder(shared_model("llama")).projections())
    assert names[:4] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert next(iter(read_decoder(shared_model("gpt2")).projections())) == "transformer.h.0.attn.c_attn"


def test_parts_name_modules_of_the_model() -> None:
    for family in TINY:
        model = shared_model(family)
        for product in read_decoder(model).projections().values():
            assert sum(rows for _, rows in product.parts) == product.weight.shape[0]
            for name, _ in product.parts:
                model.get_submodule(name)


def test_a_decoder_is_taken_as_it_is() -> None:
    decoder = read_decoder(shared_model())
    assert read_decoder(decoder) is decoder


def test_a_half_precision_model_is_read_in_its_type() -> None:
    model = tiny_model("gemma3").to(torch.bfloat16)
    decoder = read_decoder(model)
    assert decoder.dtype == decoder.norm.weight.dtype == torch.bfloat16
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(forward.normalise(decoder.norm, x), model.model.norm(x))  # 1 + weight is not rounded


def test_an_unknown_family_is_named_with_those_that_are_known() -> None:
    model = tiny_model()
    model.config.model_type = "mamba"
    with pytest.raises(BadInput, match=r"'mamba'.*llama, qwen2, qwen3, gemma"):
        read_decoder(model)
    with pytest.raises(BadInput, match=r"Linear has no config\.model_type"):
        read_decoder(nn.Linear(2, 2))


def test_rotary_scaling_that_depends_on_the_length_is_refused() -> None:
    model = tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    with pytest.raises(BadInput, match="'dynamic' changes with the length"):
        read_decoder(model)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(BadInput, match="the model has no layers"):
        read_decoder(tiny_model(num_hidden_layers=0))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(BadInput, match="activation 'mish'"):
        read_decoder(tiny_model(hidden_act="mish"))


def test_encoders_are_refused() -> None:
    with pytest.raises(BadInput, match="both directions"):
        read_decoder(tiny_model("gemma3", use_bidirectional_attention=True))
    with pytest.raises(BadInput, match="attends to an encoder"):
        read_decoder(tiny_model("gpt2", add_cross_attention=True))
