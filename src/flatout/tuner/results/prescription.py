"""flatout.toml: what was kept, with its proof.

`flatout run` reads only the treatments; the proof is for people, and for a machine with other hardware than
the one it was made on.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.ground.atomic_files import write_whole
from flatout.ground.codec import WrongShape, decode, encode
from flatout.ground.errors import BadInput
from flatout.tuner.results.machine import Machine
from flatout.tuner.treatment import Dose, Value, treatment_of

FILE = "flatout.toml"
VERSION = 1
AGAIN = "flatout tune SCRIPT writes it again"
HEAD = "# Written by flatout tune; flatout run applies it to the unmodified script.\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A treatment that paid, and its own gain in the end; a handwritten entry has only a name and value."""

    name: str
    value: Value = True
    safety: str = "unknown"
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    checked: str = "not verified"  # how its numbers were verified
    pays_after: int | None = None  # steps, if it takes time at the start


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPatch:
    """A change of the source that paid, and the file it was proven on."""

    name: str
    value: str  # the file, and the lines that findings name
    file: str
    sha256: str  # of the file without the patches
    patched_sha256: str  # of the file with all of them
    safety: str
    ratio: float
    low: float
    high: float
    checked: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was gained, and against which noise."""

    ratio: float  # all treatments together against none
    low: float
    high: float
    noise_low: float  # the same job against itself
    noise_high: float
    smallest_gain: float | None = None  # the smallest that pairs of runs could show
    loss_envelope: float | None = None  # of the loss: how far runs of the job itself differ, at most
    reproducible: bool
    step_s: float  # without treatments
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prescription:
    """Treatments for one job."""

    command: tuple[str, ...] = ()
    treatments: tuple[Kept, ...] = ()
    proof: Proof | None = None
    machine: Machine | None = None  # the machine of the proof
    patches: tuple[KeptPatch, ...] = ()  # flatout tune --apply writes them, flatout run omits them
    version: int = VERSION

    def doses(self) -> tuple[Dose, ...]:
        return tuple(Dose(name=each.name, value=each.value) for each in self.treatments)

    def patch_doses(self) -> tuple[Dose, ...]:
        return tuple(Dose(name=each.name, value=each.value) for each in self.patches)


def save_prescription(prescription: Prescription, path: Path) -> None:
    """Write it as TOML, completely or not at all."""
    write_whole(path, _toml(encode(prescription)).encode())


def load_prescription(path: Path) -> Prescription:
    """Read what `flatout tune` or a person wrote."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read: {error.strerror}", hint="flatout tune SCRIPT writes one"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}", hint=AGAIN) from None
    if data.get("version", VERSION) != VERSION:
        raise BadInput(f"{path} has version {data['version']}; this flatout reads {VERSION}", hint=AGAIN)
    try:
        found = decode(Prescription, data)
    except WrongShape as error:
        raise BadInput(f"{path}: {error}", hint=AGAIN) from None
    for dose in (*found.doses(), *found.patch_doses()):
        treatment_of(dose)
    return found


def _toml(data: dict[str, Any]) -> str:
    """Format plain values first, then tables: all the TOML that this file needs."""
    lines = [HEAD]
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    lists = {
        name: value
        for name, value in data.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for name, value in data.items():
        if name not in tables and name not in lists and value is not None:
            lines.append(f"{name} = {json.dumps(value)}\n")
    lines += [f"\n[[{name}]]\n{_rows(row)}" for name, rows in lists.items() for row in rows]
    lines += [f"\n[{name}]\n{_rows(row)}" for name, row in tables.items()]
    return "".join(lines)


def _rows(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {_plain(value)}\n" for key, value in table.items() if value is not None)


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value)
