"""`flatout run`: become an unmodified script under the treatments of its prescription."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flatout.ground.codec import encode
from flatout.ground.errors import BadInput
from flatout.ground.script.main import start_command
from flatout.ground.units import show_ratio
from flatout.tuner.child import MODULE, ChildOptions
from flatout.tuner.results.machine import differences
from flatout.tuner.results.prescription import FILE, Prescription, load_prescription


def run(command: Sequence[str], *, module: bool, prescription: Path | None) -> NoReturn:
    """Replace this process by the script: its number, terminal, signals and exit code are its own."""
    path = prescription or Path(FILE)
    if not path.is_file():
        raise BadInput(f"there is no prescription at {path}", hint=f"flatout tune {command[0]} writes one")
    found = load_prescription(path)
    print(f"flatout: {announce(found)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    options = ChildOptions(command=tuple(command), module=module, doses=found.doses())
    os.execv(sys.executable, start_command(MODULE, json.dumps(encode(options))))


def announce(prescription: Prescription) -> str:
    """One line: what is applied, what it gained, and whether that was on this machine."""
    if prescription.patches:
        files = ", ".join(dict.fromkeys(f"{each.name} in {each.file}" for each in prescription.patches))
        print(f"flatout: not applied: {files}: flatout tune --apply writes it", file=sys.stderr)
    if not prescription.treatments:
        return "the prescription holds no treatment; the script runs as it is"
    words = ", ".join(str(dose) for dose in prescription.doses())
    proof = prescription.proof
    if proof is None:
        return f"{words}; no proof is written down: flatout tune measures it"
    words += f"; {show_ratio(proof.ratio)} when it was tuned"
    found = differences(prescription.machine) if prescription.machine else []
    if found:
        words += (
            f" on other hardware ({'; '.join(found)}): flatout tune {prescription.command[0]} proves it here"
        )
    return words
