"""Sentiment: labels as people write them, archives, and a head that learns."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.kinds.sentiment import LABELS, Sentiment
from flatout.engines.adapters.tasks.task import encode_all
from flatout.ground.errors import BadInput
from tests.support.adapters import tiny_tokenizer


@pytest.mark.parametrize(("written", "meant"), [(0, 0), ("1", 1), ("Positive", 1), ("neg", 0)])
def test_labels_as_people_write_them(written: object, meant: int) -> None:
    assert Sentiment().record_of({"sentence": "fine.", "label": written}) == {
        "text": "fine.",
        "label": LABELS[meant],
    }


def test_another_label_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'label' is 2 \(known: 0, 1, neg, "):
        Sentiment().record_of({"text": "fine.", "label": 2})


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for suffix, content in members.items():
            made.writestr(f"folder/polarity.{suffix}", content)
    return path


def test_an_archive_with_a_sentence_per_line(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.zip", neg=b"dull . \n\nflat .\n", pos="gut gemacht\ncaf\xe9".encode("latin-1")
    )
    assert Sentiment().read(path) == [
        {"text": "dull .", "label": "negative"},
        {"text": "flat .", "label": "negative"},
        {"text": "gut gemacht", "label": "positive"},
        {"text": "café", "label": "positive"},
    ]


def test_archives_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="lacks a member"):
        Sentiment().read(archive(tmp_path / "a.zip", neg=b"dull"))
    (tmp_path / "b.zip").write_bytes(b"no archive")
    with pytest.raises(BadInput, match="cannot be read"):
        Sentiment().read(tmp_path / "b.zip")
    with pytest.raises(BadInput, match="does not exist"):
        Sentiment().read(tmp_path / "c.zip")


def test_a_text_that_is_too_long_is_cut() -> None:
    (example,) = encode_all(
        Sentiment(), [{"text": "x " * 99}], tiny_tokenizer(), max_length=9, training=False
    )[0]
    assert len(example.ids) == 9 and example.ids[-1] == tiny_tokenizer().sep_token_id


def test_the_head_learns_generated_reviews_from_their_words() -> None:
    task = Sentiment()
    splits = task.records(DataOptions(source="generated", num_train=500, num_test=100))
    tokenizer = tiny_tokenizer()
    # One random vector per word of the text: the head must find the words that praise.
    words = sorted({word for record in splits.train + splits.test for word in record["text"].split()})
    vectors = torch.randn(len(words), 64, generator=torch.Generator().manual_seed(0))

    def prepared(records: list[dict[str, str]]) -> tuple[torch.Tensor, object]:
        examples, _ = encode_all(task, records, tokenizer, max_length=200, training=True)
        batch = task.collate(examples, adapter=0, pad_id=0)
        states = torch.zeros(batch.block.num_rows, batch.block.length, 64)
        for row, record in enumerate(records):
            states[row] = vectors[[words.index(word) for word in record["text"].split()]].mean(0)
        return states, batch

    torch.manual_seed(0)
    head = task.head(64)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    states, batch = prepared(splits.train)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(head, states, batch).backward()  # type: ignore[arg-type]
        optimizer.step()
    states, batch = prepared(splits.test)
    said = task.predict(head, states, batch, tokenizer=tokenizer, records=splits.test)  # type: ignore[arg-type]
    assert task.score(said, splits.test)["accuracy"] > 85
