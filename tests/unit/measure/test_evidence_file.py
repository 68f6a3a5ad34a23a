from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.codec import encode
from flatout.ground.errors import EvidenceUnreadable
from flatout.measure import evidence_file
from flatout.measure.evidence import EVIDENCE_VERSION
from flatout.measure.evidence_file import decode_evidence, load_evidence, save_evidence
from tests.support import doctor as builders


def test_a_full_document_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "made" / "e.json"
    save_evidence(builders.evidence(), path)
    assert load_evidence(path) == load_evidence(str(path)) == builders.evidence()
    assert [each.name for each in path.parent.iterdir()] == ["e.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    save_evidence(builders.evidence(), path)
    before = path.read_bytes()
    broken = builders.evidence(attributed_step_s=math.nan)
    with pytest.raises(ValueError, match="JSON"):
        save_evidence(broken, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def unreadable(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(EvidenceUnreadable) as raised:
        load_evidence(path)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


@given(share=st.floats(0.0, 1.0, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = json.dumps(builders.evidence().to_json())
    path = tmp_path_factory.mktemp("cut") / "e.json"
    assert "e.json is not complete JSON" in unreadable(path, text[: int(len(text) * share)])


def test_a_later_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    data = {**builders.evidence().to_json(), "version": EVIDENCE_VERSION + 1}
    message = unreadable(tmp_path / "e.json", json.dumps(data))
    assert f"version {EVIDENCE_VERSION + 1}" in message
    assert "pip install --upgrade flatout" in message


@pytest.mark.parametrize("version", [None, "1", 1.5, [1], True])
def test_a_version_that_is_no_version_is_refused(version: Any, tmp_path: Path) -> None:
    data = {**builders.evidence().to_json(), "version": version}
    assert "version" in unreadable(tmp_path / "e.json", json.dumps(data))


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null", "{}", '{"format": "flatout-diagnosis"}'])
def test_foreign_json_is_refused(text: str, tmp_path: Path) -> None:
    assert "is not an Evidence file" in unreadable(tmp_path / "e.json", text)


def test_a_damaged_field_is_named_by_its_path(tmp_path: Path) -> None:
    data = builders.evidence().to_json()
    data["steps"][3]["step_s"] = "fast"
    assert "steps[3].step_s is str, expected float" in unreadable(tmp_path / "e.json", json.dumps(data))


def test_a_missing_field_is_named_by_its_path(tmp_path: Path) -> None:
    data = builders.evidence().to_json()
    del data["job"]["device"]
    assert "job.device is missing" in unreadable(tmp_path / "e.json", json.dumps(data))


def test_a_field_of_a_later_release_is_ignored() -> None:
    data = {**json.loads(json.dumps(builders.evidence().to_json())), "moons": 3}
    assert decode_evidence(data, name="e.json") == builders.evidence()


def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EvidenceUnreadable, match="no Evidence file at"):
        load_evidence(tmp_path / "absent.json")
    with pytest.raises(EvidenceUnreadable, match="cannot be read"):
        load_evidence(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(EvidenceUnreadable, match="cannot be read"):
        load_evidence(tmp_path / "binary.json")


def test_a_name_that_ends_in_gz_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, evidence = tmp_path / "e.json.gz", builders.evidence()
    save_evidence(evidence, path)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert load_evidence(path) == evidence
    monkeypatch.setattr(evidence_file, "MOST_BYTES", 100)
    with pytest.raises(EvidenceUnreadable, match="holds more than"):
        load_evidence(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(EvidenceUnreadable, match="cannot be read"):
        load_evidence(path)


def test_what_diagnose_prints_as_json_holds_evidence_too(tmp_path: Path) -> None:
    evidence = builders.evidence()
    document = {"format": "flatout-diagnosis", "version": 1, "findings": [], "evidence": evidence.to_json()}
    (tmp_path / "diagnosis.json").write_text(json.dumps(document))
    assert load_evidence(tmp_path / "diagnosis.json") == evidence


def test_evidence_of_version_1_names_its_counterfactuals() -> None:
    def old(name: str, **fields: Any) -> dict[str, Any]:
        made = encode(builders.counterfactuals()[0])
        del made["kind"], made["label"]
        return {**made, "name": name, **fields}

    place = {"file": "train.py", "line": 9}
    data = builders.evidence().to_json()
    data["version"] = 1
    data["counterfactuals"] = [old("cached"), old("without", place=place, last_line=11)]
    data["steps"] = [{**step, "arm": "without"} if step["arm"] == "half" else step for step in data["steps"]]
    cached, without = decode_evidence(data, name="e.json").counterfactuals
    assert (cached.kind, cached.label) == ("cached", "cached")
    assert (without.kind, without.label) == ("knock-out", "knock-out train.py:9")
    upgraded = decode_evidence(data, name="e.json")
    assert len(upgraded.kept(without.label)) == len(builders.evidence().kept("half")) > 0
    del data["counterfactuals"][0]["name"]
    with pytest.raises(EvidenceUnreadable, match=r"counterfactuals\[0\]\.kind is missing"):
        decode_evidence(data, name="e.json")
