"""The model's own forward gives what the packed engine gives, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.engines.steering.trials.hooked_trials import HookedTrials
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.steering import WHERE, Steering
from flatout.engines.steering.trials.trial_engine import AnswerPair, ChoiceRow, TextRow
from tests.support.multiplex import prompts_of, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def steerings(model: Any) -> list[Steering | None]:
    generator = torch.Generator().manual_seed(3)
    width = model.config.hidden_size
    made: list[Steering | None] = [None]
    for layer, where in enumerate(WHERE):
        direction = torch.randn(width, generator=generator)
        made.append(
            Steering(
                layer=layer % model.config.num_hidden_layers, direction=direction, amount=0.7, where=where
            )
        )
    return made


def test_choices_agree_with_the_packed_engine(model: Any) -> None:
    prompts = prompts_of([3, 9, 6])
    answers = [((4,), (5,)), ((7, 8, 9), (7, 6)), ((3, 5), (4, 5, 6))]
    rows = [
        ChoiceRow(choice=AnswerPair(prompt=prompt, positive=positive, negative=negative), steering=one)
        for prompt, (positive, negative) in zip(prompts, answers, strict=True)
        for one in steerings(model)
    ]
    packed = dict(PackedTrials(model).choices(rows))
    for batch_tokens in (1, 40, 8192):
        hooked = dict(HookedTrials(model, batch_tokens=batch_tokens).choices(rows))
        assert hooked == pytest.approx(packed, abs=1e-4)


def test_likelihoods_agree_with_the_packed_engine(model: Any) -> None:
    texts = prompts_of([2, 12, 7])
    for one in steerings(model):
        packed = PackedTrials(model).log_likelihoods(texts, one)
        hooked = HookedTrials(model, batch_tokens=16).log_likelihoods(texts, one)
        assert [count for _, count in hooked] == [count for _, count in packed] == [1, 11, 6]
        assert [value for value, _ in hooked] == pytest.approx([value for value, _ in packed], abs=1e-3)


def test_texts_agree_token_for_token(model: Any) -> None:
    rows = [TextRow(prompt=prompt, steering=one) for prompt in prompts_of([4, 8]) for one in steerings(model)]
    packed = PackedTrials(model, slots=4, max_tokens=32).texts(rows, max_new_tokens=6)
    seen: list[int] = []
    engine = HookedTrials(model, slots=3)
    hooked = engine.texts(rows, max_new_tokens=6, on_finished=lambda number, _: seen.append(number))
    assert hooked == packed
    assert sorted(seen) == list(range(len(rows)))
    assert len(set(hooked)) > 2, "steering changes nothing"
