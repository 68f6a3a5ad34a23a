"""Similarity: the encoder reads both texts, and each can be asked about."""

from __future__ import annotations

import numpy as np

from flatout.engines.adapters.tasks.kinds.similarity import Similarity
from flatout.testing.adapter_tasks import tiny_tokenizer


def test_both_texts_are_read_and_told_apart() -> None:
    task, tokenizer = Similarity(mean=0.0, deviation=2.0), tiny_tokenizer()
    record = task.record_of({"sentence1": "the film", "sentence2": "a story", "score": 3})
    assert record == {"text": "the film", "other": "a story", "score": 3.0}
    example = task.encode(record, tokenizer, max_length=32)
    assert tokenizer.decode(example.ids) == "[CLS] the film [SEP] a story [SEP]"
    assert example.types is not None and example.types.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert float(example.targets["value"]) == 1.5
    swapped = task.encode({**record, "text": "a story", "other": "the film"}, tokenizer, max_length=32)
    assert not np.array_equal(swapped.ids, example.ids)


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut() -> None:
    tokenizer = tiny_tokenizer()
    example = Similarity().encode({"text": "the " * 50, "other": "a story"}, tokenizer, max_length=9)
    assert len(example.ids) == 9 and tokenizer.decode(example.ids).endswith("a story [SEP]")
    assert not example.trainable


def test_the_score_of_generated_pairs_is_how_many_words_they_share() -> None:
    for row in Similarity().generated(20, seed=0):
        assert len(set(row["text"].split()) & set(row["other"].split())) == row["score"]
