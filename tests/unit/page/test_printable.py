"""Printable text: harmless, and nothing harmless is lost."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from flatout.page.printable import printable, shorten


@given(st.text())
def test_printable_text_holds_no_control_code_and_keeps_its_length(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in shown)
    shown.encode("utf-8")


def test_printable_text_keeps_what_is_harmless() -> None:
    assert printable("größe × 日本 …") == "größe × 日本 …"
    assert printable("def f():\n\t\x1b[31m\r", keep="\n\t") == "def f():\n\t\ufffd[31m "
    assert printable("a\tb\x1b[0m\u202e\udcff") == "a b\ufffd[0m\ufffd\ufffd"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("abcd", 3) == "abc …"
