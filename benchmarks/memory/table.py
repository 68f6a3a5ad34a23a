"""The measured table, as it is committed, joined with the configurations it was measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.memory.configuration import Configuration
from benchmarks.memory.configurations import SETS, every_configuration

RESULTS = Path(__file__).parent / "results"


def latest_table(subject: str = "measured") -> Path | None:
    """The last committed file `<subject>_<hardware>_<date>.json`, by its date."""
    found = sorted(RESULTS.glob(f"{subject}_*.json"), key=lambda path: path.stem.rsplit("_", 1)[-1])
    return found[-1] if found else None


def read_table(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def write_table(path: Path, table: dict[str, Any]) -> None:
    """One line per key and one per row, so that a change of one row is a change of one line."""
    heads = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != "rows"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["rows"])
    path.write_text("{\n" + ",\n".join([*heads, f' "rows": [\n{rows}\n ]']) + "\n}\n", encoding="utf-8")


def measured_rows(table: dict[str, Any]) -> list[tuple[Configuration, dict[str, Any]]]:
    """Every measured configuration that still exists, with its row; failed rows are left out."""
    configurations = {each.label: each for configurations_of in SETS.values() for each in configurations_of()}
    return [
        (configurations[row["label"]], row)
        for row in table["rows"]
        if row["label"] in configurations and "error" not in row
    ]


def unmatched(table: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(measured but no longer a configuration, a configuration but not measured)."""
    configurations = {each.label for each in every_configuration()}
    measured = {row["label"] for row in table["rows"] if "error" not in row}
    return sorted(measured - configurations), sorted(configurations - measured)
