"""A prompt is a text or token numbers."""

from __future__ import annotations

import pytest

from flatout.engines.evolution.tasks.task import Prompt, text_of_ids


def test_a_prompt_is_one_of_the_two() -> None:
    assert Prompt(text="a", answer={}, key="a").token_ids is None
    assert Prompt(token_ids=(1,), answer={}, key="a").text is None
    for both in ({}, {"text": "a", "token_ids": (1,)}):
        with pytest.raises(ValueError, match="either a text or token numbers"):
            Prompt(answer={}, key="a", **both)  # type: ignore[arg-type]


def test_token_numbers_as_text() -> None:
    assert text_of_ids([4, 10, 7]) == "4 10 7"
    assert text_of_ids(()) == ""
