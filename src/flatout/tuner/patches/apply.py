"""Turn the patches of a prescription into edits of the files they were proven on."""

from __future__ import annotations

from pathlib import Path

from flatout.ground.errors import BadInput
from flatout.tuner.patches.patch import patched_texts, read_text, sha256, sites_of
from flatout.tuner.patches.source import Refused
from flatout.tuner.results.prescription import Prescription


def edits_of(prescription: Prescription, *, folder: Path) -> dict[Path, tuple[bytes, bytes]]:
    """Map each file to (its content, its patched content); raise BadInput if a file is not the proven one."""
    if not prescription.patches:
        raise BadInput("flatout.toml holds no patch", hint="flatout tune --patch SCRIPT looks for some")
    again = f"nothing was written; flatout tune --patch {prescription.command[0]} proves them again"
    for patch in prescription.patches:
        found = sha256(read_text(folder / patch.file) or "")
        if found == patch.patched_sha256:
            raise BadInput(f"{patch.file} already has the patches", hint="flatout tune --undo reverts them")
        if found != patch.sha256:
            raise BadInput(f"{patch.file} has changed since {patch.name} was proven on it", hint=again)
    try:
        texts = patched_texts(sites_of(prescription.patch_doses()), folder=folder)
    except Refused as refusal:
        raise BadInput(f"the patches cannot be written: {refusal}", hint=again) from None
    return {
        folder / file: (before.encode("utf-8"), after.encode("utf-8"))
        for file, (before, after) in texts.items()
    }
