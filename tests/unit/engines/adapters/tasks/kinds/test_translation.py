"""Translation: pairs from files, from compiled catalogues and from a table of words."""

from __future__ import annotations

import gettext
import io
import struct
from pathlib import Path

import pytest

from flatout.engines.adapters.tasks.data_rows import DataOptions
from flatout.engines.adapters.tasks.kinds import translation
from flatout.engines.adapters.tasks.kinds.translation import PACKAGES, Translation
from flatout.engines.adapters.tasks.task import Prediction
from flatout.ground import packages
from flatout.ground.errors import NotFetched

MESSAGES = {
    "": "Content-Type: text/plain; charset=UTF-8\n",
    "Open  file": "Datei öffnen",
    "menu\4Close": "Schließen",
    "%d hour\0%d hours": "%d Stunde\0%d Stunden",
    "OK": "OK",
    "%s": "%s!",
}


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
    if not all(packages.folder_of(package).is_dir() for package in PACKAGES):
        pytest.skip("the German catalogues are not in the user's cache, and tests fetch nothing")
    splits = Translation().records(DataOptions())
    assert splits.origin == "German catalogues of jupyterlab-language-pack-de-DE and django"
    assert len(splits.train) > 1000 and len(splits.validation) > 100 and len(splits.test) > 100


def compiled(messages: dict[str, str], *, order: str = "<") -> bytes:
    """A catalogue as msgfmt writes it."""
    table, texts, start = b"", b"", 28 + 16 * len(messages)
    for side in (list(messages), list(messages.values())):
        for text in side:
            content = text.encode()
            table += struct.pack(f"{order}II", len(content), start + len(texts))
            texts += content + b"\0"
    head = struct.pack(f"{order}7I", translation.MAGIC, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0)
    return head + table + texts


@pytest.mark.parametrize("order", ["<", ">"])
def test_sentences_with_words_are_found(order: str) -> None:
    assert list(translation.messages(compiled(MESSAGES, order=order))) == [
        ("Open file", "Datei öffnen"),
        ("Close", "Schließen"),
        ("%d hour", "%d Stunde"),
        ("%d hours", "%d Stunden"),
    ]


def test_the_catalogue_of_this_test_is_one() -> None:
    read = gettext.GNUTranslations(io.BytesIO(compiled(dict(sorted(MESSAGES.items())))))
    assert read.gettext("Open  file") == "Datei öffnen"
    assert read.pgettext("menu", "Close") == "Schließen"


def test_german_files_of_the_cached_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    for number, package in enumerate(translation.PACKAGES):
        for language, word in (("de", "Wort"), ("fr", "mot")):
            folder = packages.folder_of(package) / "locale" / language
            folder.mkdir(parents=True)
            (folder / "a.mo").write_bytes(compiled({f"word {number}": word, "shared": f"{word} {number}"}))
    assert translation.german_pairs() == [("word 0", "Wort"), ("shared", "Wort 0"), ("word 1", "Wort")]


def test_without_a_network_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(NotFetched, match="jupyterlab-language-pack-de-DE"):
        translation.german_pairs()


def test_the_real_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATOUT_CACHE")
    if not all(packages.folder_of(package).is_dir() for package in translation.PACKAGES):
        pytest.skip("the German catalogues are not in the user's cache, and tests fetch nothing")
    pairs = dict(translation.german_pairs())
    assert len(pairs) > 1500
    assert pairs["New password"] == "Neues Passwort"
