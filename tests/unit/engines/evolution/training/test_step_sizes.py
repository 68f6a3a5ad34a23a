from __future__ import annotations

import torch

from flatout.engines.evolution.settings import EvolveConfig
from flatout.engines.evolution.training import step_sizes
from flatout.multiplex.models.families import read_decoder
from tests.support import multiplex as tiny_models


def config(**given: object) -> EvolveConfig:
    return EvolveConfig(model="m", task="digit-copy", **given)  # type: ignore[arg-type]


def test_sigma_follows_the_spread_of_the_weights() -> None:
    decoder = read_decoder(tiny_models.tiny_model("llama"))
    before = step_sizes.of(config(), decoder)
    with torch.no_grad():
        for product in decoder.projections().values():
            product.weight.mul_(10)
    after = step_sizes.of(config(), decoder)
    assert 9 < after.sigma.value / before.sigma.value < 11
    assert after.lr.value > after.sigma.value
    assert "3%" in after.sigma.reason


def test_what_is_given_stays() -> None:
    decoder = read_decoder(tiny_models.tiny_model("llama"))
    steps = step_sizes.of(config(sigma=0.5, lr=0.25), decoder)
    assert (steps.sigma.value, steps.lr.value) == (0.5, 0.25)
    assert steps.sigma.source == "assumed"


def test_integers_move_by_shares() -> None:
    decoder = read_decoder(tiny_models.tiny_model("llama"))
    assert step_sizes.of(config(arithmetic="int8"), decoder).lr.value == step_sizes.INTEGER_LR
