"""Translation: pairs from files, from catalogues and from a table of words."""

from __future__ import annotations

import pytest

from flatout import packages
from flatout.engines.adapters.tasks import DataOptions, Prediction
from flatout.engines.adapters.tasks.catalogues import PACKAGES
from flatout.engines.adapters.tasks.translation import Translation


def test_bleu_stands_beside_token_accuracy() -> None:
    records = [{"source": "the dog sleeps in the big house", "target": "der Hund schläft im großen Haus"}]
    said = [Prediction(text="der hund schlaft im großen haus", num_correct=3, num_targets=6)]
    assert Translation().score(said, records) == {"token_accuracy": 50, "bleu": pytest.approx(100)}


def test_one_word_stands_for_one_word() -> None:
    table: dict[str, set[str]] = {}
    for record in Translation().generated(300, seed=0):
        table.setdefault(" ".join(record["source"].split()[:2]), set()).add(
            " ".join(record["target"].split()[:2])
        )
    assert len(table) == 8 and all(len(words) == 1 for words in table.values())


def test_real_rows_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATOUT_CACHE")
    if not all(packages.is_cached(package) for package in PACKAGES):
        pytest.skip("the German catalogues are not in the user's cache, and tests fetch nothing")
    splits = Translation().records(DataOptions())
    assert splits.origin == "German catalogues of jupyterlab-language-pack-de-DE and django"
    assert len(splits.train) > 1000 and len(splits.validation) > 100 and len(splits.test) > 100
