"""The scores of many rows at once are those that sacrebleu gives one by one."""

from __future__ import annotations

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.rewards.bleu import Bleu
from flatout.ground.errors import BadInput

# Few words, so that texts share n-grams, repeat them, and are often shorter than four words.
texts = st.lists(st.sampled_from(["the", "cat", "The", "sat,", "3.5", "on", "&amp;", "-"]), max_size=12).map(
    " ".join
)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=20), st.booleans())
def test_rows_together_equal_sacrebleu(pairs: list[tuple[str, str]], lowercase: bool) -> None:
    reward = Bleu(lowercase=lowercase)
    rows = [(completion, {"target": target}) for completion, target in pairs]
    expected = [
        sacrebleu.sentence_bleu(completion, [target], lowercase=lowercase).score / 100
        for completion, target in pairs
    ]
    assert reward.score_rows(rows) == pytest.approx(expected, abs=1e-12)
    assert [reward(*row) for row in rows] == pytest.approx(expected, abs=1e-12)


def test_ends_of_the_scale() -> None:
    text = "ein ganzer Satz mit acht Wörtern steht hier"
    assert Bleu().score_rows([(text, {"target": text})]) == pytest.approx([1.0])
    assert (
        Bleu().score_rows([("", {"target": text}), ("x y", {"target": text}), (text, {"target": ""})])
        == [0.0] * 3
    )
    assert Bleu().score_rows([]) == []


def test_the_tokenizer_is_the_one_asked_for() -> None:
    row = ("ab c", {"target": "abc"})
    assert Bleu(tokenize="char").score_rows([row]) == pytest.approx([1.0])
    assert Bleu().score_rows([row]) == [0.0]


def test_an_unknown_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"'13b'.*known: .*13a"):
        Bleu(tokenize="13b")
