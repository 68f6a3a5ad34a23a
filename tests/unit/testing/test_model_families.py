"""A family that is added from outside passes its contract, and one that is read wrongly does not."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.errors import BadInput
from flatout.multiplex.models.decoder import Decoder
from flatout.multiplex.models.families import FAMILIES, read_decoder
from flatout.testing.model_families import ModelFamilyContract

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
}

# All that a package has to bring beside the entry point.
READER = """
from flatout.multiplex.models.decoder import Attention, DecoderBlock, Decoder, Mlp
from flatout.multiplex.models.families import activation_of, head_of, layer_norm, rotary_tables
from flatout.multiplex.models.stacking import stacked


def read_starcoder2(model):
    config, body = model.config, model.model
    cos, sin = rotary_tables(body.rotary_emb, config, like=body.embed_tokens.weight)

    def read_block(layer, name):
        attention = layer.self_attn
        return DecoderBlock(
            attention_norm=layer_norm(layer.input_layernorm),
            attention=Attention(
                qkv=stacked(model, [f"{name}.self_attn.{part}_proj" for part in "qkv"]),
                out=stacked(model, [f"{name}.self_attn.o_proj"]),
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_width=attention.head_dim,
                scale=attention.scaling,
                cos=cos,
                sin=sin,
                rotary_width=attention.head_dim,
            ),
            mlp_norm=layer_norm(layer.post_attention_layernorm),
            mlp=Mlp(
                up=stacked(model, [f"{name}.mlp.c_fc"]),
                down=stacked(model, [f"{name}.mlp.c_proj"]),
                activation=activation_of(config),
                gated=False,
            ),
        )

    return Decoder(
        embedding=body.embed_tokens.weight.detach(),
        blocks=tuple(read_block(layer, f"model.layers.{i}") for i, layer in enumerate(body.layers)),
        norm=layer_norm(body.norm),
        head=head_of(model),
        max_positions=config.max_position_embeddings,
    )
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package outside of Flatout, as pip would leave it."""
    (tmp_path / "outside_family.py").write_text(READER)
    described = tmp_path / "outside_family-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-family\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[flatout.model_families]\nstarcoder2 = outside_family:read_starcoder2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_family", raising=False)


class TestStarcoder2(ModelFamilyContract):
    def make_model(self) -> Any:
        from transformers import Starcoder2Config, Starcoder2ForCausalLM

        return Starcoder2ForCausalLM(Starcoder2Config(**SIZES))


def test_the_family_is_none_of_ours_and_an_unknown_one_is_told_of_entry_points() -> None:
    assert "starcoder2" not in FAMILIES
    model = TestStarcoder2().make_model()
    model.config.model_type = "starcoder3"
    with pytest.raises(BadInput, match=r"'starcoder3' is not a family.*starcoder2.*entry point"):
        read_decoder(model)


@pytest.mark.parametrize(
    ("changes", "test"),
    [
        ({"rotary_width": 4}, "test_logits_are_those_of_the_model"),
        ({"scale": 1.0}, "test_tokens_are_those_of_the_model"),
        ({"num_kv_heads": 4, "num_heads": 2}, "test_a_variant_is_the_model_with_its_weights_changed"),
    ],
)
def test_a_family_that_is_read_wrongly_fails(
    changes: dict[str, Any], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import outside_family  # type: ignore[import-not-found]

    plain = outside_family.read_starcoder2

    def read_wrongly(model: Any) -> Decoder:
        decoder: Decoder = plain(model)
        blocks = [
            dataclasses.replace(block, attention=dataclasses.replace(block.attention, **changes))
            for block in decoder.blocks
        ]
        return dataclasses.replace(decoder, blocks=tuple(blocks))

    monkeypatch.setattr(outside_family, "read_starcoder2", read_wrongly)
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(TestStarcoder2(), test)()


def test_a_reader_that_gives_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import outside_family

    monkeypatch.setattr(outside_family, "read_starcoder2", lambda model: model)
    with pytest.raises(BadInput, match=r"reader of 'starcoder2' gives a Starcoder2ForCausalLM"):
        read_decoder(TestStarcoder2().make_model())
