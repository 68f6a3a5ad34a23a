"""How quantities are shown to people, read and rounded.  Unknown is None in data and "n/a" on screen."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNKNOWN = "n/a"


def show(value: object, form: str = "{}") -> str:
    """Show any value in a format: `show(power_w, "{:.0f} W")`."""
    return UNKNOWN if value is None else form.format(value)


def show_seconds(seconds: float | None) -> str:
    """Show three significant digits in the unit that keeps them readable: 12.9 s, 21.6 ms, 4.10 µs."""
    if seconds is None:
        return UNKNOWN
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def show_rough(seconds: float | None) -> str:
    """Show a waiting time in whole seconds, then minutes, then hours."""
    if seconds is None:
        return UNKNOWN
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def show_bytes(num_bytes: float | None) -> str:
    """Show bytes in binary units: 512 B, 21.0 MiB, 139 GiB."""
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def show_byte_rate(bytes_per_s: float | None) -> str:
    """Show bytes per second: 21.0 MiB/s."""
    return UNKNOWN if bytes_per_s is None else f"{show_bytes(bytes_per_s)}/s"


def read_bytes(text: str) -> int | None:
    """Read "512MB", "1.5 GiB" or "4096"; None if it is not a size.  GB is a thousand MB, GiB 1024 MiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", text, flags=re.IGNORECASE)
    if found is None:
        return None
    power = " KMGT".find((found[2] or " ").upper())
    unit_bytes: int = (1024 if found[3] else 1000) ** power
    return round(float(found[1]) * unit_bytes)


def show_share(share: float | None) -> str:
    """Show a fraction as a percentage: 0.123 -> 12 %, 0.004 -> 0.4 %."""
    if share is None:
        return UNKNOWN
    percent = share * 100
    return f"{percent:.1f} %" if 0 < abs(percent) < 1 else f"{percent:.0f} %"


def show_ratio(ratio: float | None) -> str:
    """Show a speed-up: 1.04×, 597×."""
    return UNKNOWN if ratio is None else f"{_three_digits(ratio)}×"


def show_interval(low: float | None, high: float | None) -> str:
    """Show the interval of a speed-up, `[1.60, 2.00]`; nothing if there is none."""
    return "" if low is None or high is None else f"[{_three_digits(low)}, {_three_digits(high)}]"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def show_joules(joules: float | None) -> str:
    """Show joules: 0.76 J, 48.9 J, 480 kJ, 2.1 MJ."""
    if joules is None:
        return UNKNOWN
    for scale, unit in ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if abs(joules) >= scale:
            return f"{joules / scale:.3g} {unit}"
    return f"{joules:.3g} J"


def show_time(seconds: float | None) -> str:
    """Show the time since a run began: 0:42, 12:05, 3:20:00, 2 d 4 h."""
    if seconds is None:
        return UNKNOWN
    whole = round(max(seconds, 0.0))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def show_some(names: Iterable[object], *, most: int) -> str:
    """List at most `most` names, and three dots for the rest: "a, b, ..."."""
    shown = list(map(str, names))
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")


def round_up(value: int, multiple: int) -> int:
    """Return the next multiple of a number that is not below `value`."""
    return -(-value // multiple) * multiple
