"""Texts as distinct token sequences, and what pairs have in common."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.engines.steering.extract.tokens import common_tokens, encode, encode_ahead
from flatout.engines.steering.questions import Question, question_of
from flatout.ground.errors import BadInput
from tests.support.steering import word_tokenizer


def test_equal_texts_are_one_sequence() -> None:
    encoded = encode(["t03 t04", "t05", "t03 t04"], tokenizer=word_tokenizer())
    assert [tokens.tolist() for tokens in encoded.sequences] == [[3, 4], [5]]
    assert encoded.row_of == (0, 1, 0)
    assert encoded.pairs == ()
    assert len(set(encoded.keys)) == 2
    assert all(len(key) == 32 for key in encoded.keys)


def test_pairs_give_all_positive_texts_and_then_all_negative_ones() -> None:
    pairs = [
        Question(prompt="t03 t04", positive=" t05", negative=" t06", key="a"),
        Question(prompt="t07", positive=" t08", negative=" t09", key="b"),
    ]
    encoded = encode(pairs, tokenizer=word_tokenizer())
    assert encoded.tokens() == [(3, 4, 5), (7, 8), (3, 4, 6), (7, 9)]
    assert encoded.pairs == ((0, 2), (1, 3))


def test_a_text_that_begins_with_the_start_token_gets_no_second_one() -> None:
    encoded = encode(["t01 t05", "t05"], tokenizer=word_tokenizer(start=True))
    assert encoded.tokens() == [(1, 5), (1, 5)]
    assert len(encoded.sequences) == 1


def test_the_side_a_tokenizer_pads_on_does_not_matter() -> None:
    texts = ["t03 t04 t05", "t06"]
    left, right = (encode(texts, tokenizer=word_tokenizer(side=side)) for side in ("left", "right"))
    assert (left.tokens(), left.keys) == (right.tokens(), right.keys)


def test_a_tokenizer_set_to_pad_and_cut_by_an_earlier_call_gives_whole_texts() -> None:
    texts, tokenizer = ["t03 t04 t05", "t06"], word_tokenizer()
    tokenizer(texts, padding=True, truncation=True, max_length=2)
    assert encode(texts, tokenizer=tokenizer).tokens() == [(3, 4, 5), (6,)]


def test_a_tokenizer_with_a_call_of_its_own_is_called() -> None:
    tokenizer = word_tokenizer()

    class Lowering(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: list[str], **options: Any) -> Any:
            return super().__call__([one.lower() for one in text], **options)

    tokenizer.__class__ = Lowering
    assert encode(["T03 t04", "T05"], tokenizer=tokenizer).tokens() == [(3, 4), (5,)]


def test_texts_that_cannot_be_read_are_refused() -> None:
    pair = Question(prompt="t03", positive=" t05", negative=" t06", key="a")
    with pytest.raises(BadInput, match="no texts"):
        encode([], tokenizer=word_tokenizer())
    with pytest.raises(BadInput, match="text 1 has no tokens: ''"):
        encode(["t03", ""], tokenizer=word_tokenizer())
    with pytest.raises(BadInput, match="all strings or all pairs"):
        encode(["t03", pair], tokenizer=word_tokenizer())  # type: ignore[list-item]


def test_common_tokens_are_counted_from_the_start() -> None:
    assert common_tokens((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_tokens((1, 2), (1, 2, 3)) == 2
    assert common_tokens((1,), (2,)) == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(4, 200))
@example(lengths=[4, 1], characters=16)  # sorted, and yet one window
def test_windows_hold_every_text_once_the_shortest_first(lengths: list[int], characters: int) -> None:
    texts = [" ".join(["t03"] * length) for length in lengths]
    windows = list(encode_ahead(texts, tokenizer=word_tokenizer(), window_characters=characters))
    assert sorted(place for places, _ in windows for place in places) == list(range(len(texts)))
    for places, encoded in windows:
        assert [len(encoded.sequences[row]) for row in encoded.row_of] == [lengths[place] for place in places]
    sequences = [sequence for _, encoded in windows for sequence in encoded.sequences]
    assert len(sequences) == len(set(lengths))  # equal texts lie in one window
    longest = [max(lengths[place] for place in places) for places, _ in windows]
    assert longest == sorted(longest)


def test_a_text_without_tokens_is_named_by_its_place_among_all() -> None:
    texts = ["t03 " * 20, "t04 " * 20, "", "t05 " * 20]
    windows = encode_ahead(texts, tokenizer=word_tokenizer(), window_characters=40)
    with pytest.raises(BadInput, match="text 2 has no tokens"):
        next(windows)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("limit", [None, 1, 9, 40])
def test_windows_of_what_was_encoded_are_those_texts_alone(limit: int | None, pairs: bool) -> None:
    plain = [" ".join(["t05"] * (1 + place % 4)) for place in range(9)]
    texts: Any = [question_of(text, positive=" t07", negative=" t08") for text in plain] if pairs else plain
    whole = encode(texts, tokenizer=word_tokenizer())
    assert (whole.num_given, whole.num_sides) == (9, 1 + pairs)
    seen: list[int] = []
    computed: list[bytes] = []
    for places, some in whole.windows(limit):
        seen += places
        computed += some.keys
        assert (
            some.tokens() == encode([texts[place] for place in places], tokenizer=word_tokenizer()).tokens()
        )
        assert some.num_given == len(places) and len(some.pairs) == len(places) * pairs
    assert sorted(seen) == list(range(9))
    assert len(computed) == len(set(computed)), "equal texts lie in one window"
