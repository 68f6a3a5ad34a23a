"""How quantities are shown to people.  Unknown is None in data and "n/a" on screen."""

from __future__ import annotations

UNKNOWN = "n/a"


def show_seconds(seconds: float | None) -> str:
    """Three significant digits with the unit that keeps them readable: 12.9 s, 21.6 ms, 4.10 µs."""
    if seconds is None:
        return UNKNOWN
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def show_rough(seconds: float | None) -> str:
    """A time to wait: whole seconds, then minutes, then hours; nobody waits for tenths."""
    if seconds is None:
        return UNKNOWN
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def show_bytes(num_bytes: float | None) -> str:
    """Binary units: 512 B, 21.0 MiB, 139 GiB."""
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def show_share(share: float | None) -> str:
    """A fraction as a percentage: 0.123 -> 12 %, 0.004 -> 0.4 %."""
    if share is None:
        return UNKNOWN
    percent = share * 100
    return f"{percent:.1f} %" if 0 < abs(percent) < 1 else f"{percent:.0f} %"


def show_ratio(ratio: float | None) -> str:
    """A speed-up: 1.04×, 597×."""
    return UNKNOWN if ratio is None else f"{_three_digits(ratio)}×"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
