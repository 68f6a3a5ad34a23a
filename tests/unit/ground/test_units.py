"""How quantities are shown: three digits, a readable unit, and n/a for unknown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.units import (
    UNKNOWN,
    read_bytes,
    round_up,
    show,
    show_byte_rate,
    show_bytes,
    show_joules,
    show_ratio,
    show_rough,
    show_seconds,
    show_share,
    show_some,
    show_time,
)

SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    "shows",
    [show_byte_rate, show_bytes, show_joules, show_ratio, show_rough, show_seconds, show_share, show_time],
)
def test_unknown_is_never_a_number(shows: Callable[[float | None], str]) -> None:
    assert shows(None) == UNKNOWN == "n/a"
    assert shows(0) != UNKNOWN


def test_any_value_is_shown_in_its_format_and_unknown_in_none() -> None:
    assert (show(None), show(0), show(None, "{:.0f} W"), show(83.5, "{:.1f} W")) == (
        "n/a",
        "0",
        "n/a",
        "83.5 W",
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.9, "12.9 s"),
        (0.0216, "21.6 ms"),
        (4.1e-6, "4.10 µs"),
        (250e-9, "250 ns"),
        (0, "0 s"),
        (1, "1.00 s"),
        (123.4, "123 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (2**10, "1.00 KiB"),
        (21 * 2**20, "21.0 MiB"),
        (139 * 2**30, "139 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.123, "12 %"), (0.004, "0.4 %"), (0, "0 %"), (1, "100 %"), (0.01, "1 %")]
)
def test_shares(share: float, text: str) -> None:
    assert show_share(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (600, "10 min"), (5399, "90 min"), (9000, "2.5 h")]
)
def test_times_to_wait(seconds: float, text: str) -> None:
    assert show_rough(seconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.04, "1.04×"), (597, "597×"), (12.94, "12.9×")])
def test_ratios(ratio: float, text: str) -> None:
    assert show_ratio(ratio) == text


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_shown_seconds_are_the_seconds_to_three_digits(seconds: float) -> None:
    number, unit = show_seconds(seconds).split()
    assert float(number) * SECONDS[unit] == pytest.approx(seconds, rel=5.1e-3)


@given(st.integers(min_value=0, max_value=2**50))
def test_shown_bytes_are_the_bytes_to_three_digits(num_bytes: int) -> None:
    number, unit = show_bytes(num_bytes).split()
    assert float(number) * BYTES[unit] == pytest.approx(num_bytes, rel=5.1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (42.4, "0:42"), (725, "12:05"), (12000, "3:20:00"), (187200, "2 d 4 h"), (-1, "0:00")],
)
def test_times(seconds: float, text: str) -> None:
    assert show_time(seconds) == text


@pytest.mark.parametrize(
    ("joules", "shown"),
    [(0.0004, "0.0004 J"), (0.76, "760 mJ"), (48.9, "48.9 J"), (480e3, "480 kJ"), (2.1e6, "2.1 MJ")],
)
def test_joules(joules: float, shown: str) -> None:
    assert show_joules(joules) == shown


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512_000_000),
        ("2kib", 2048),
        ("7 B", 7),
        ("GB", None),
        ("-1", None),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int | None) -> None:
    assert read_bytes(text) == num_bytes


@given(value=st.integers(0, 10_000), multiple=st.integers(1, 300))
def test_a_number_is_rounded_up_to_the_next_multiple(value: int, multiple: int) -> None:
    assert round_up(value, multiple) % multiple == 0
    assert value <= round_up(value, multiple) < value + multiple


def test_a_long_list_is_cut() -> None:
    assert show_some(["a", "b"], most=2) == "a, b"
    assert show_some(iter(range(4)), most=2) == "0, 1, ..."


def test_a_rate_of_bytes_has_their_unit() -> None:
    assert show_byte_rate(3 * 2**20) == "3.00 MiB/s"
