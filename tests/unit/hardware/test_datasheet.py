"""A row's derived facts."""

from __future__ import annotations

import dataclasses

from flatout.ground.codec import decode, encode
from flatout.hardware.datasheet import DTYPES, Datasheet
from flatout.hardware.matching import find_datasheet


def t4() -> Datasheet:
    row = find_datasheet("Tesla T4")
    assert row is not None
    return row


def test_memory_is_what_the_driver_reports() -> None:
    assert t4().memory_bytes == 15360 * 2**20
    assert t4().sold_gb == 16


def test_memory_without_a_record_is_the_decimal_reading_of_the_sold_size() -> None:
    assert dataclasses.replace(t4(), reported_mib=None).memory_bytes == 16 * 10**9


def test_bf16_follows_the_peaks() -> None:
    assert not t4().bf16
    assert dataclasses.replace(t4(), peak_flops={"bf16": 1.0}).bf16


def test_a_row_survives_json() -> None:
    assert decode(Datasheet, encode(t4())) == t4()


def test_dtypes_are_distinct() -> None:
    assert len(set(DTYPES)) == len(DTYPES) == 7
