"""Scores of small texts that can be counted by hand, and what holds for all of them."""

from __future__ import annotations

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks import metrics

words = st.lists(st.sampled_from(["a", "the", "cat", "dog", "sat", "on", "mat", "3", ",", "."]), max_size=9)
texts = words.map(" ".join)


def test_labels() -> None:
    assert metrics.accuracy(["x", "y", "x", "x"], ["x", "y", "y", "x"]) == 75
    # x: precision 2/3, recall 1, F1 0.8; y: precision 1, recall 1/2, F1 2/3
    assert metrics.macro_f1(["x", "y", "x", "x"], ["x", "y", "y", "x"]) == pytest.approx(
        100 * (0.8 + 2 / 3) / 2
    )
    assert metrics.accuracy([], []) == metrics.macro_f1([], []) == 0


def test_answers_are_compared_as_squad_does() -> None:
    assert metrics.plain_answer("The  Amazon, basin!") == "amazon basin"
    assert metrics.exact_match(["the Amazon basin", "Rome"], ["Amazon Basin.", "Oslo"]) == 50
    # two of three words are shared with two of two: 2 * 2 / (3 + 2)
    assert metrics.span_f1(["big Amazon basin"], ["the Amazon basin"]) == pytest.approx(80)
    assert metrics.span_f1(["", "the"], ["Rome", ""]) == 50


def test_rouge_by_hand() -> None:
    said, wanted = ["the cat sat on the mat"], [["the cat is on the mat"]]
    assert metrics.rouge(said, wanted, order="1") == pytest.approx(100 * 5 / 6)
    assert metrics.rouge(said, wanted, order="2") == pytest.approx(100 * 3 / 5)
    assert metrics.rouge(said, wanted, order="L") == pytest.approx(100 * 5 / 6)
    assert metrics.rouge(["cat the"], [["the cat"]], order="L") == pytest.approx(50)
    assert metrics.rouge(["a b"], [["x y", "A, b!"]], order="2") == 100
    assert metrics.rouge([""], [[""]], order="1") == 0


@given(words, words)
def test_the_longest_common_subsequence_is_that_of_a_plain_table(one: list[str], other: list[str]) -> None:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, left in enumerate(one):
        for j, right in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    assert metrics.longest_common(one, other) == table[-1][-1]


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_every_score_is_in_points_and_a_copy_gets_all_of_them(pairs: list[tuple[str, str]]) -> None:
    said, wanted = [one for one, _ in pairs], [other for _, other in pairs]
    scores = [metrics.rouge(said, [[text] for text in wanted], order=order) for order in ("1", "2", "L")]
    scores += [metrics.span_f1(said, wanted), metrics.exact_match(said, wanted), metrics.bleu(said, wanted)]
    assert all(-1e-9 <= score <= 100 + 1e-9 for score in scores)
    assert metrics.exact_match(said, said) == metrics.span_f1(said, said) == 100


def test_bleu_is_sacrebleus_without_case_accents_and_spacing() -> None:
    wanted = ["Die Änderung ist für drei_Tage (v2) da.", "Er geht heute in die Stadt."]
    assert metrics.bleu(
        ["die anderung ist fur drei _ tage ( v 2 ) da .", wanted[1]], wanted
    ) == pytest.approx(100)
    said = ["er geht in die stadt heute .", "die stadt ist heute da ."]
    expected = sacrebleu.metrics.BLEU(tokenize="none").corpus_score(
        said, [["die anderung ist fur drei _ tage ( v 2 ) da .", "er geht heute in die stadt ."]]
    )
    assert metrics.bleu(said, wanted) == pytest.approx(expected.score)
    assert metrics.bleu([], []) == 0


def test_correlations_and_what_is_explained() -> None:
    true = [1.0, 2.0, 3.0, 4.0, 10.0]
    doubled = [2 * value for value in true]
    assert metrics.pearson(doubled, true) == pytest.approx(100) and metrics.spearman(
        doubled, true
    ) == pytest.approx(100)
    assert metrics.explained_variance(true, true) == 100 and metrics.explained_variance(doubled, true) < 0
    # By hand: ranks 1, 2.5, 2.5, 4, 5 against 1 to 5.
    assert metrics.spearman([1, 7, 7, 8, 9], true) == pytest.approx(100 * 9.5 / (9.5 * 10) ** 0.5)
    assert metrics.spearman([-value for value in true], true) == pytest.approx(-100)
    assert (
        metrics.pearson([3.0] * 5, true)
        == metrics.explained_variance([4.0] * 5, true)
        == metrics.spearman([], [])
        == 0
    )


def test_the_f1_of_each_label() -> None:
    found = metrics.label_f1(["a", "a", "b"], ["a", "b", "b"], labels=("b", "a", "c"))
    assert found == {"a": pytest.approx(200 / 3), "b": pytest.approx(200 / 3), "c": 0}
    assert metrics.macro_f1(["a", "a", "b"], ["a", "b", "b"]) == pytest.approx(200 / 3)
