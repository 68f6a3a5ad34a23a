"""A device that is not in this machine, by the name of a GPU or by an amount of memory.

"A100-80GB" gives everything the datasheet knows.  "24GB" or "24GiB" gives a device with that memory and
no peaks, for questions that only ask whether something fits.  GiB is binary, as written.  GB is what cards
are sold by: 24GB is what the driver reports of the smallest card on record that is sold with 24 GB (an A10:
23028 MiB), and decimal where no card is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from flatout.ground.errors import UnknownDevice
from flatout.ground.units import read_bytes
from flatout.hardware.datasheet import Datasheet
from flatout.hardware.device import Device, device_of_datasheet
from flatout.hardware.matching import all_datasheets, plain_name

MEMORY_ONLY = "only its memory was given"
MAX_SUGGESTIONS = 4


def simulated_device(name: str) -> Device:
    """Make the device called `name`; raise UnknownDevice with the closest names."""
    by_memory = _memory_only(name)
    if by_memory is not None:
        return by_memory
    wanted = plain_name(name)
    # People write "4090" and "RTX 4090".
    found = _rows_called(wanted) or _rows_called(f"rtx{wanted}")
    if len(found) == 1:
        return device_of_datasheet(found[0])
    if found:
        raise UnknownDevice(f"{name!r} matches more than one device", hint=_choice(row.name for row in found))
    raise UnknownDevice(f"no single device is called {name!r}", hint=_hint(wanted))


def _rows_called(wanted: str) -> list[Datasheet]:
    """Find the rows of that name; our names go before those that drivers give to several boards."""
    own = [row for row in all_datasheets() if wanted in map(plain_name, (row.name, *row.aliases))]
    return own or [row for row in all_datasheets() if wanted in map(plain_name, row.driver_names)]


def _memory_only(name: str) -> Device | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)[\s_-]*([mgt]i?b)\s*", name, flags=re.IGNORECASE)
    if match is None:
        return None
    amount, unit = float(match[1]), match[2].casefold()
    memory_bytes = read_bytes(match[1] + unit) or 0
    sold = [row for row in all_datasheets() if unit == "gb" and row.sold_gb == amount and row.reported_mib]
    card = min(sold, key=lambda row: row.memory_bytes, default=None)
    if card is not None:
        memory_bytes = card.memory_bytes
    if memory_bytes <= 0:
        raise UnknownDevice(f"a device of {name!r} has no memory", hint='write it as "24GB" or "24GiB"')
    fields = ("compute_capability", "bf16", "peak_flops", "bandwidth_bytes_per_s")
    return Device(
        name=name.strip(),
        memory_bytes=memory_bytes,
        simulated=True,
        source=None if card is None else f"what {card.name} has, the least of cards sold with {name.strip()}",
        missing=dict.fromkeys(fields, MEMORY_ONLY),
    )


def _plain_names(row: Datasheet) -> set[str]:
    return {plain_name(name) for name in (row.name, *row.aliases, *row.driver_names)}


def _hint(wanted: str) -> str:
    """Suggest names that begin alike ("A100"), then names with a similar spelling ("A1000-80GB")."""
    rows = all_datasheets()
    begin = [row.name for row in rows if wanted and any(n.startswith(wanted) for n in _plain_names(row))]
    spelt = {plain: row.name for row in rows for plain in _plain_names(row)}
    close = [spelt[plain] for plain in difflib.get_close_matches(wanted, spelt, n=MAX_SUGGESTIONS)]
    names = list(dict.fromkeys([*begin, *close]))
    if not names:
        return 'flatout devices --datasheet lists all; "24GB" gives a device of that much memory'
    return _choice(names)


def _choice(names: Iterable[str]) -> str:
    listed = list(names)[:MAX_SUGGESTIONS]
    return f"did you mean {' or '.join([', '.join(listed[:-1]), listed[-1]] if listed[1:] else listed)}?"
