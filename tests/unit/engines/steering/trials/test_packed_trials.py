from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.engines.steering.settings import Where
from flatout.engines.steering.trials.packed_trials import PackedTrials
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import MODES, WHERE, Steering
from flatout.engines.steering.trials.trial_engine import AnswerPair, ChoiceRow, TextRow
from flatout.ground.errors import BadInput
from flatout.multiplex.models.families import read_decoder
from tests.support.multiplex import prompts_of, reference_tokens, shared_model, tiny_model

WIDTH, NEW = 48, 12


def steering(layer: int, amount: float, *, seed: int, where: Where = "last-and-generated") -> Steering:
    drawn = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    return Steering(layer=layer, direction=drawn / drawn.norm(), amount=amount, where=where)


def some_rows(wheres: tuple[Where, ...] = WHERE) -> list[TextRow]:
    """Six trials and the unsteered model on four prompts."""
    trials: list[Steering | None] = [
        steering(index % 2, 2.0 + index, seed=index, where=wheres[index % len(wheres)]) for index in range(6)
    ]
    return [
        TextRow(prompt=prompt, steering=trial)
        for trial in [*trials, None]
        for prompt in prompts_of([3, 9, 6, 14])
    ]


def alone(model: Any, row: TextRow, *, max_new_tokens: int = NEW) -> tuple[int, ...]:
    with steered_model(model, [row.steering]):
        return reference_tokens(model, row.prompt, max_new_tokens=max_new_tokens)


def test_packed_is_sequential_token_for_token() -> None:
    model, rows = shared_model(), some_rows()
    expected = [alone(model, row) for row in rows]
    heard: dict[int, tuple[int, ...]] = {}
    engine = PackedTrials(model, slots=5, max_tokens=40)
    assert engine.texts(rows, max_new_tokens=NEW, on_finished=heard.__setitem__) == expected
    assert [heard[number] for number in range(len(rows))] == expected
    plain = [reference_tokens(model, row.prompt, max_new_tokens=NEW) for row in rows]
    assert sum(one != other for one, other in zip(expected, plain, strict=True)) >= len(rows) // 2
    # The tables are rewritten for the next call.
    assert engine.texts(rows[:3], max_new_tokens=NEW) == expected[:3]


@settings(max_examples=8)
@given(st.randoms(use_true_random=False), st.integers(1, 9))
def test_slots_and_order_change_nothing(drawn: random.Random, slots: int) -> None:
    model, rows = shared_model(), some_rows()
    whole = PackedTrials(model, slots=len(rows), max_tokens=40).texts(rows, max_new_tokens=5)
    order = list(range(len(rows)))
    drawn.shuffle(order)
    chosen = order[:10]
    found = PackedTrials(model, slots=slots, max_tokens=40).texts([rows[i] for i in chosen], max_new_tokens=5)
    assert found == [whole[i] for i in chosen]


def test_nothing_added_is_the_plain_model() -> None:
    model = shared_model()
    engine = PackedTrials(model, slots=4, max_tokens=40)
    for where in WHERE:
        rows = [
            TextRow(prompt=prompt, steering=steering(1, 0.0, seed=0, where=where))
            for prompt in prompts_of([4, 8])
        ]
        expected = [reference_tokens(model, row.prompt, max_new_tokens=NEW) for row in rows]
        assert engine.texts(rows, max_new_tokens=NEW) == expected
        choice = AnswerPair(prompt=(5, 6, 7), positive=(8, 9), negative=(10,))
        asked = [
            ChoiceRow(choice=choice, steering=one) for one in (None, steering(0, 0.0, seed=1, where=where))
        ]
        odds = dict(engine.choices(asked))
        assert odds[0] == pytest.approx(odds[1], abs=2e-5)


def test_a_text_ends_where_the_model_ends_it() -> None:
    model = shared_model()
    row = some_rows(("generated",))[0]
    tokens = alone(model, row)
    for end in (tokens[0], tokens[3]):
        engine = PackedTrials(model, slots=2, max_tokens=40, eos=[end])
        (found,) = engine.texts([row], max_new_tokens=NEW)
        assert found == tokens[: tokens.index(end) + 1]
    assert PackedTrials(model, slots=2, max_tokens=40).texts([row], max_new_tokens=1) == [tokens[:1]]


def test_a_prompt_is_computed_once_for_all_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PackedTrials(shared_model(), slots=4, max_tokens=40)
    rows = some_rows(("last-and-generated",))
    engine.texts(rows[:1], max_new_tokens=1)
    generator = engine._generator_for({0, 1})
    stepper, computed = generator.stepper, []
    prefill = stepper.prefill

    def counted(state: Any, parts: Any, **options: Any) -> None:
        computed.extend(part.tokens for part in parts if part.tokens)
        prefill(state, parts, **options)

    monkeypatch.setattr(stepper, "prefill", counted)
    engine.texts(rows, max_new_tokens=3)
    assert len(computed) == len(set(computed)) == 4


def test_a_generator_is_made_again_only_for_another_layer() -> None:
    engine = PackedTrials(shared_model(), slots=2, max_tokens=40)
    one, other = (TextRow(prompt=(5, 6), steering=steering(layer, 3.0, seed=layer)) for layer in (0, 1))
    engine.texts([one], max_new_tokens=2)
    first = engine._generator
    engine.texts([one], max_new_tokens=2)
    assert engine._generator is first
    assert engine.texts([one, other], max_new_tokens=4) == [
        alone(shared_model(), row, max_new_tokens=4) for row in (one, other)
    ]
    assert engine._generator is not first


# Choices


@torch.no_grad()
def expected_odds(model: Any, row: ChoiceRow, *, tail: int = 0) -> float:
    """log p(positive) - log p(negative) without their last `tail` tokens, each answer a text of its own."""

    def log_probability(answer: tuple[int, ...]) -> float:
        prompt = row.choice.prompt
        with steered_model(model, [row.steering], prompt_lengths=[len(prompt)]):
            scores = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        kept = answer[: len(answer) - tail]
        return sum(float(scores[len(prompt) - 1 + place, token]) for place, token in enumerate(kept))

    return log_probability(row.choice.positive) - log_probability(row.choice.negative)


ANSWERS = {
    "one token": ((8,), (9,), 0),
    "a common head": ((8, 9), (8, 10), 0),
    "a common tail": ((8, 9, 7), (8, 10, 7), 1),
    "different lengths": ((8, 9, 11), (8, 12), 0),
    "one begins the other": ((8,), (8, 12), 0),
}


@pytest.mark.parametrize("answers", ANSWERS)
def test_choices_are_the_odds_of_the_answers(answers: str) -> None:
    model = shared_model()
    positive, negative, common = ANSWERS[answers]
    trials = [None, *(steering(i % 2, 3.0 + i, seed=i, where=WHERE[i % 3]) for i in range(6))]
    rows = [
        ChoiceRow(choice=AnswerPair(prompt=prompt, positive=positive, negative=negative), steering=trial)
        for prompt in prompts_of([1, 7, 4])
        for trial in trials
    ]
    engine = PackedTrials(model, batch_tokens=64)
    for by, tail in (("whole", 0), ("decisive", common)):
        asked = [replace(row, by=by) for row in rows]
        found = dict(engine.choices(asked))
        assert sorted(found) == list(range(len(rows)))
        for number, row in enumerate(asked):
            assert found[number] == pytest.approx(expected_odds(model, row, tail=tail), abs=3e-5)


# Likelihoods


@torch.no_grad()
def test_likelihoods_are_those_of_whole_texts() -> None:
    model = shared_model()
    texts = prompts_of([5, 12, 9])
    for trial in (None, *(steering(1, 4.0, seed=2, where=where) for where in WHERE)):
        found = PackedTrials(model).log_likelihoods(texts, trial)
        for text, (value, count) in zip(texts, found, strict=True):
            with steered_model(model, [trial], prompt_lengths=[1]):
                scores = model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)
            assert count == len(text) - 1
            assert value == pytest.approx(
                sum(float(scores[i, token]) for i, token in enumerate(text[1:])), abs=1e-4
            )


def test_changed_weights_are_seen() -> None:
    model = tiny_model()
    engine = PackedTrials(model, slots=2, max_tokens=40)
    rows = some_rows(("last-and-generated",))[:4]
    asked = [ChoiceRow(choice=AnswerPair(prompt=rows[0].prompt, positive=(8,), negative=(9,)), steering=None)]
    engine.texts(rows, max_new_tokens=4)
    list(engine.choices(asked))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    engine.weights_changed()
    assert engine.texts(rows, max_new_tokens=4) == [alone(model, row, max_new_tokens=4) for row in rows]
    assert dict(engine.choices(asked))[0] == pytest.approx(expected_odds(model, asked[0]), abs=1e-4)


def test_trials_of_every_mode_and_of_two_layers_share_a_call() -> None:
    model = shared_model()
    made: list[Steering | None] = [
        replace(
            steering(0, 4.0, seed=7 + place),
            mode=mode,
            others=(replace(steering(1, 2.0, seed=place), mode=mode),),
        )
        for place, mode in enumerate(MODES)
    ]
    rows = [TextRow(prompt=prompt, steering=one) for one in [*made, None] for prompt in prompts_of([3, 9])]
    expected = [alone(model, row) for row in rows]
    heard: dict[int, tuple[int, ...]] = {}
    engine = PackedTrials(model, slots=4, max_tokens=40)
    assert engine.texts(rows, max_new_tokens=NEW, on_finished=heard.__setitem__) == expected
    assert [heard[number] for number in range(len(rows))] == expected
    plain = [reference_tokens(model, row.prompt, max_new_tokens=NEW) for row in rows]
    assert sum(one != other for one, other in zip(expected, plain, strict=True)) >= 5
    with pytest.raises(BadInput, match="give the transformers model"):
        PackedTrials(read_decoder(model), slots=1).texts(rows[2:3], max_new_tokens=2)


def test_tables_written_at_once_hold_what_each_steering_adds() -> None:
    model = shared_model()
    given_ones = [steering(index % 2, 0.37 * index - 1, seed=index) for index in range(5)]
    rows = [TextRow(prompt=prompts_of([4])[0], steering=one) for one in given_ones]
    engine = PackedTrials(model, slots=7, max_tokens=40)
    engine.texts(rows, max_new_tokens=2)
    tables = engine._tables.of_layer
    assert sorted(tables) == [0, 1]
    for entry, one in enumerate(given_ones):
        assert torch.equal(tables[one.layer][entry], one.added())
        assert not tables[1 - one.layer][entry].any()
    assert not any(table[len(given_ones) :].any() for table in tables.values())
