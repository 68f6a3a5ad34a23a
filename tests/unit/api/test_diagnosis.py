from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.api import diagnose, diagnose_evidence, diagnose_script
from flatout.doctor.examine import Diagnosis, examine
from flatout.ground.errors import BadInput, EvidenceUnreadable
from flatout.measure.evidence_file import decode_evidence, load_evidence, save_evidence
from tests.support import doctor as builders
from tests.support.measure import line_of, write_script


def test_saved_evidence_gives_the_findings_of_the_live_one(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    save_evidence(builders.evidence(), path)
    diagnosis = diagnose_evidence(path)
    assert diagnosis.evidence == builders.evidence()
    assert diagnosis.findings == examine(builders.evidence())
    assert diagnosis.findings
    assert (diagnosis.evidence_path, diagnosis.script_exit_code) == (path, None)


def test_unreadable_evidence_is_an_error_of_the_tree(tmp_path: Path) -> None:
    with pytest.raises(EvidenceUnreadable):
        diagnose_evidence(tmp_path / "absent.json")


def test_the_document_is_versioned_and_holds_its_evidence() -> None:
    made = Diagnosis(evidence=builders.evidence(), findings=examine(builders.evidence()))
    document = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert (document["format"], document["version"]) == ("flatout-diagnosis", 1)
    assert decode_evidence(document["evidence"], name="document") == made.evidence
    assert [finding["code"] for finding in document["findings"]] == [each.code for each in made.findings]


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """A loop that makes a tensor per row."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        (x,) = batch
        rows = [row + torch.tensor([1.0, 2.0, 3.0, 4.0]) for row in x]  # at: rows
        model(torch.stack(rows)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    loader = DataLoader(TensorDataset(torch.randn(640, 4)), batch_size=64)
    return diagnose(step, loader, seconds=60.0)


def test_a_loop_is_diagnosed_in_this_process(diagnosis: Diagnosis) -> None:
    assert diagnosis.evidence.job.ended == "measured"
    # on a busy machine another rule than FO301 may speak of the line
    line = line_of(Path(__file__), "rows")
    assert f"tests/unit/api/test_diagnosis.py:{line}" in {str(each.place) for each in diagnosis.findings}
    assert diagnosis.evidence_path is None


def test_its_findings_are_those_of_its_evidence_on_any_machine(diagnosis: Diagnosis, tmp_path: Path) -> None:
    save_evidence(diagnosis.evidence, tmp_path / "e.json")
    assert diagnose_evidence(tmp_path / "e.json").findings == diagnosis.findings


def test_a_script_is_diagnosed_in_a_process_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
    for x, y in DataLoader(data, batch_size=16):
        train_step(x, y)
    print("its own output")
    sys.exit(4)
    """
    script = write_script(tmp_path / "train.py", body)
    told: list[str] = []
    found = diagnose_script(
        [str(script)], evidence_path=tmp_path / "e.json", seconds=60.0, on_progress=told.append
    )
    assert found.script_exit_code == 4
    assert found.evidence == load_evidence(tmp_path / "e.json")
    assert found.findings == examine(found.evidence)
    assert capfd.readouterr().out == "its own output\n"


def test_a_script_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        diagnose_script([str(tmp_path / "absent.py")], evidence_path=tmp_path / "e.json")
