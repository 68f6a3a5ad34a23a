"""Evidence on disk: one JSON document, complete or absent; compressed if its name ends in .gz."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from flatout.ground.atomic_files import replace_whole
from flatout.ground.codec import WrongShape, decode
from flatout.ground.errors import EvidenceUnreadable
from flatout.measure.evidence import EVIDENCE_VERSION, Evidence

MOST_BYTES = 256 << 20  # of a compressed file, unpacked; typical evidence takes five million


def save_evidence(evidence: Evidence, path: Path) -> None:
    """Write the document atomically: a reader never sees half a file."""
    text = json.dumps(evidence.to_json(), allow_nan=False, separators=(",", ":")).encode()
    replace_whole(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def load_evidence(path: Path | str) -> Evidence:
    """Read an Evidence file, or raise EvidenceUnreadable with one sentence."""
    path = Path(path)
    try:
        text = _read_bytes(path).decode("utf-8")
    except FileNotFoundError:
        raise EvidenceUnreadable(
            f"no Evidence file at {path}", hint="check the path; flatout diagnose --save FILE writes one"
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise EvidenceUnreadable(f"{path} cannot be read: {error}") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise EvidenceUnreadable(
            f"{path} is not complete JSON (line {error.lineno}, column {error.colno})",
            hint="it was cut or edited; run flatout diagnose again",
        ) from None
    return decode_evidence(data, name=str(path))


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise EvidenceUnreadable(
            f"{path} holds more than {MOST_BYTES >> 20} MiB", hint="give a file of flatout diagnose"
        )
    return text


def decode_evidence(data: Any, *, name: str) -> Evidence:
    if isinstance(data, dict) and data.get("format") == "flatout-diagnosis":
        data = data.get("evidence")  # diagnose --json wraps the evidence
    if not isinstance(data, dict) or data.get("format") != "flatout-evidence":
        raise EvidenceUnreadable(
            f"{name} is not an Evidence file", hint="flatout diagnose writes one, and --save FILE names it"
        )
    version = data.get("version")
    if not isinstance(version, int) or version > EVIDENCE_VERSION:
        raise EvidenceUnreadable(
            f"{name} has Evidence version {version}; this flatout reads up to {EVIDENCE_VERSION}",
            hint="pip install --upgrade flatout",
        )
    if version == 1:
        data = _from_version_1(data)
    try:
        return decode(Evidence, data, name)
    except WrongShape as error:
        raise EvidenceUnreadable(
            f"Evidence file is damaged: {error}", hint="run flatout diagnose again"
        ) from None


def _from_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Convert version 1, where a counterfactual had only a name and "without" was the one knock-out."""
    labels: dict[str, str] = {}
    try:
        for found in data.get("counterfactuals", ()):
            labels[found["name"]] = found["name"]
            if found["name"] == "without":
                labels["without"] = f"knock-out {found['place']['file']}:{found['place']['line']}"
        counterfactuals = [
            {**found, "kind": labels[found["name"]].partition(" ")[0], "label": labels[found["name"]]}
            for found in data.get("counterfactuals", ())
        ]
        steps = [{**step, "arm": labels.get(step["arm"], step["arm"])} for step in data.get("steps", ())]
    except (TypeError, KeyError):
        return data  # damaged: decoding reports where
    return {**data, "counterfactuals": counterfactuals, "steps": steps, "version": EVIDENCE_VERSION}
