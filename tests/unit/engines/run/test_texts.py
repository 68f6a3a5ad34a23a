"""Rows are decoded together as they are one by one, by one call."""

from __future__ import annotations

import pytest

from flatout.engines.run.texts import decode_rows
from tests.support.steering import tokenizer

ROWS = [(3, 4, 5), (7,), (), (9, 8)]


def test_many_rows_are_decoded_as_each_alone() -> None:
    alone = [tokenizer().decode(list(row), skip_special_tokens=True) for row in ROWS]
    assert decode_rows(tokenizer(), ROWS, extra="steering") == alone
    assert decode_rows(tokenizer(), [], extra="steering") == []


def test_rows_are_not_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a row was decoded alone")

    plain = tokenizer()
    expected = decode_rows(plain, ROWS, extra="steering")
    for kind in type(plain).__mro__:
        if "decode" in vars(kind) and "_decode" in vars(kind):
            monkeypatch.setattr(kind, "_decode", refuse)
    assert decode_rows(plain, ROWS, extra="steering") == expected


def test_a_tokenizer_of_another_kind_is_asked_itself() -> None:
    class Shouting(type(tokenizer())):  # type: ignore[misc]
        def _decode(self, *given: object, **options: object) -> str:
            return str(super()._decode(*given, **options)).upper()

    loud = Shouting(tokenizer_object=tokenizer().backend_tokenizer, unk_token="w0")
    assert decode_rows(loud, ROWS[:2], extra="steering") == ["W3 W4 W5", "W7"]
