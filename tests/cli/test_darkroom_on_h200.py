"""The example at its full size, batch 512, as it was measured on an H200: the doctor replayed on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flatout.api import diagnose_evidence
from flatout.doctor.examine import Diagnosis
from flatout.ground.units import show_seconds

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "tests" / "data" / "darkroom_h200.json"
MODEL = "examples/darkroom/model.py"


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return diagnose_evidence(EVIDENCE)


def guilty_lines() -> dict[str, set[int]]:
    lines: dict[str, set[int]] = {}
    for number, text in enumerate((ROOT / MODEL).read_text().splitlines(), start=1):
        if "# guilty: " in text:
            for rule in text.rpartition("# guilty: ")[2].split(", "):
                lines.setdefault(rule.strip(), set()).add(number)
    return lines


def test_it_is_the_full_job_on_the_gpu(diagnosis: Diagnosis) -> None:
    evidence = diagnosis.evidence
    assert evidence.gpu is not None
    assert evidence.gpu.name == "NVIDIA H200"
    assert {step.rows for step in evidence.kept("real")} == {512}
    assert evidence.job.ended == "measured"


def test_the_recorded_source_is_the_source(diagnosis: Diagnosis) -> None:
    recorded = diagnosis.evidence.sources[MODEL]
    lines = (ROOT / MODEL).read_text().splitlines()
    assert recorded
    assert {number: lines[int(number) - 1] for number in recorded} == recorded


def test_both_rules_name_the_true_lines_and_no_other(diagnosis: Diagnosis) -> None:
    found: dict[str, set[int]] = {}
    for finding in diagnosis.findings:
        for seen in (finding, *finding.also):
            assert seen.place is not None
            assert seen.place.file == MODEL
            found.setdefault(seen.name, set()).add(seen.place.line)
    expected = guilty_lines()
    assert set(expected) == {"row-indexing-in-loop", "tensor-created-in-loop"}
    assert found == expected


def test_the_ceilings_of_both_counterfactuals_are_measured(diagnosis: Diagnosis) -> None:
    cached, half = (diagnosis.evidence.counterfactual(name) for name in ("cached", "half"))
    assert cached is not None
    assert half is not None
    assert cached.num_blocks >= 3
    assert half.num_blocks >= 3
    assert cached.speedup_low <= 1.05  # the loader is not what makes this step slow
    assert half.speedup_low > 1.5  # half the rows, half the Python: the host's loops bound it
    kernels = diagnosis.evidence.kernels
    assert kernels is not None
    assert kernels.busy_share is not None
    assert kernels.busy_share < 0.2


def test_the_readme_has_these_figures(diagnosis: Diagnosis) -> None:
    shares: Counter[str] = Counter()
    for finding in diagnosis.findings:
        for seen in (finding, *finding.also):
            shares[seen.name] += seen.share or 0.0
    creations, rows = shares["tensor-created-in-loop"], shares["row-indexing-in-loop"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{creations:.0%} (creating tensors) and {rows:.0%} (indexing rows)".replace("%", " %") in text
    assert f"takes {show_seconds(diagnosis.evidence.step_s)} per step" in text
