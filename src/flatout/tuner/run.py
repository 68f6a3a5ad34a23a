"""`flatout run`: become an unmodified script under the treatments of its prescription."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.ground.script.main import start_command
from flatout.ground.torchrun import read_launch
from flatout.ground.units import show_ratio
from flatout.tuner.child import MODULE, ChildOptions
from flatout.tuner.results.machine import differences
from flatout.tuner.results.prescription import FILE, Prescription, load_prescription


def run(command: Sequence[str], *, module: bool, prescription: Path | None) -> NoReturn:
    """Replace this process by the script, which keeps its process id, terminal, signals and exit code."""
    path = prescription or Path(FILE)
    if not path.is_file():
        raise BadInput(f"there is no prescription at {path}", hint=f"flatout tune {command[0]} writes one")
    found = load_prescription(path)
    if read_launch().is_first:
        for line in (announce(found, command), *announce_patches(found)):
            print(f"flatout: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    options = ChildOptions(command=tuple(command), module=module, doses=found.doses())
    os.execv(sys.executable, start_command(MODULE, json.dumps(encode(options))))


def announce_patches(prescription: Prescription) -> list[str]:
    """Return a line for each patch that the file on disk does not have."""
    said = []
    for patch in prescription.patches:
        try:
            now = hashlib.sha256(Path(patch.file).read_bytes()).hexdigest()
        except OSError:
            now = ""
        if now == patch.sha256:
            said.append(f"not applied: {patch.name} in {patch.file}; flatout tune --apply writes it")
        elif now != patch.patched_sha256:
            said.append(f"not applied: {patch.name}; {patch.file} has changed since it was proven")
    return said


def announce(prescription: Prescription, command: Sequence[str]) -> str:
    """Say in one line what is applied, what it gained, and whether that was on this machine."""
    if not prescription.treatments:
        return "flatout.toml holds no treatment; the script runs as it is"
    words = ", ".join(str(dose) for dose in prescription.doses())
    proof = prescription.proof
    if proof is None:
        return f"{words}; no proof is recorded; flatout tune measures it"
    tuned = prescription.command[:1]
    what = "it" if list(tuned) == list(command[:1]) else " ".join(tuned) or "another script"
    words += f"; {show_ratio(proof.ratio)} when {what} was tuned"
    found = differences(prescription.machine) if prescription.machine else []
    if found:
        words += (
            f" on other hardware ({'; '.join(found)}): flatout tune {prescription.command[0]} proves it here"
        )
    return words
