"""Features: the plain encoder's mean states, whatever the batches, and read back instead of computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.routing.features import (
    LENGTH_MULTIPLE,
    by_length,
    features_of,
    key_of,
    width_of,
)
from flatout.engines.adapters.tasks.task import Example
from flatout.ground.errors import BadInput
from tests.support.adapters import CountingEncoder, subjects, tiny_encoder, tiny_tokenizer

PAD = tiny_tokenizer().pad_token_id


@pytest.fixture(scope="module")
def encoder() -> Iterator[CountingEncoder]:
    with tiny_encoder() as opened:
        yield opened


@pytest.fixture(scope="module")
def examples(encoder: CountingEncoder) -> list[Example]:
    return [example for subject in subjects(encoder).values() for example in subject.examples]


def test_a_feature_is_the_mean_of_the_plain_models_states(
    encoder: CountingEncoder, examples: list[Example]
) -> None:
    found = features_of(encoder, examples, pad_id=PAD, fingerprint="", tokens=300)
    for number in (0, 13, len(examples) - 1):
        example = examples[number]
        inputs = {"input_ids": torch.tensor(example.ids[None], dtype=torch.long)}
        if example.types is not None:
            inputs["token_type_ids"] = torch.tensor(example.types[None], dtype=torch.long)
        with torch.no_grad():
            states = encoder.model(**inputs, output_hidden_states=True).hidden_states
        last = len(states) - 1
        depths = [states[0], states[round(last / 3)], states[round(2 * last / 3)], states[last]]
        wanted = torch.cat([alone[0].mean(dim=0) for alone in depths])
        assert torch.allclose(found[number], wanted, atol=1e-5)


def test_kept_features_are_read_and_not_computed(
    encoder: CountingEncoder, examples: list[Example], tmp_path: Path
) -> None:
    encoder.passes.clear()
    first = features_of(encoder, examples, pad_id=PAD, fingerprint="a", folder=tmp_path / "kept", tokens=300)
    assert len(encoder.passes) > 2
    encoder.passes.clear()
    again = features_of(encoder, examples, pad_id=PAD, fingerprint="a", folder=tmp_path / "kept")
    assert torch.equal(again, first) and encoder.passes == []
    other = features_of(encoder, examples, pad_id=PAD, fingerprint="b", folder=tmp_path / "kept")
    assert encoder.passes and torch.allclose(other, first, atol=1e-5)
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_states_of_one_batch_are_held_at_a_time(encoder: CountingEncoder, examples: list[Example]) -> None:
    encoder.passes.clear()
    features_of(encoder, examples, pad_id=PAD, fingerprint="", tokens=400)
    longest = max(len(example.ids) for example in examples) + LENGTH_MULTIPLE
    assert len(encoder.passes) > 3
    assert max(tokens for _, _, tokens, _ in encoder.passes) <= max(400, longest)
    assert sum(rows for _, rows, _, _ in encoder.passes) == len(examples)


def test_a_damaged_file_is_named(encoder: CountingEncoder, examples: list[Example], tmp_path: Path) -> None:
    features_of(encoder, examples[:2], pad_id=PAD, fingerprint="a", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(BadInput, match="remove it"):
        features_of(encoder, examples[:2], pad_id=PAD, fingerprint="a", folder=tmp_path)


def test_no_row_has_no_feature(encoder: CountingEncoder) -> None:
    assert features_of(encoder, [], pad_id=PAD, fingerprint="").shape == (0, width_of(encoder))


def made(*lengths: int) -> list[Example]:
    return [
        Example(ids=np.arange(length, dtype=np.int32), index=index) for index, length in enumerate(lengths)
    ]


def test_the_key_tells_rows_models_and_types_apart() -> None:
    rows = made(3, 4)
    keys = {
        key_of(rows, "a"),
        key_of(rows, "b"),
        key_of(rows[::-1], "a"),
        key_of(made(3, 5), "a"),
        key_of(made(7), "a"),
        key_of([replace(rows[0], types=np.zeros(3, dtype=np.int32)), rows[1]], "a"),
    }
    assert len(keys) == 6
    assert key_of(made(3, 4), "a") in keys


@given(st.lists(st.integers(1, 90), min_size=0, max_size=60), st.integers(8, 400))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], tokens: int) -> None:
    rows = made(*lengths)
    batches = list(by_length(rows, tokens=tokens))
    assert sorted(number for batch in batches for number in batch) == list(range(len(rows)))
    longest = [-(-max(lengths[number] for number in batch) // 8) * 8 for batch in batches]
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * length <= tokens
