from __future__ import annotations

from pathlib import Path

import pytest

from flatout.tuner.patches.patch import sha256
from flatout.tuner.results.kept import keep, keep_patches
from flatout.tuner.results.outcome import Tried
from flatout.tuner.treatment import Dose
from flatout.tuner.verdict import Gain, JobGain
from tests.unit.tuner.patches.test_patch import LOOP

GAIN = Gain(ratio=1.5, low=1.4, high=1.6, num_pairs=3, best=1.6)


def tried(dose: Dose) -> Tried:
    return Tried(
        name=dose.name,
        value=dose.value,
        safety="reordered",
        summary="",
        answer="kept",
        reason="",
        gain=GAIN,
        job=JobGain(extra_s=2.0, pays_after=40),
    )


def test_an_entry_holds_the_interval_the_check_and_when_it_pays() -> None:
    found = keep(tried(Dose(name="threads", value=2)), checked="as close as the job's")
    assert (found.name, found.value, found.low, found.high) == ("threads", 2, 1.4, 1.6)
    assert found.checked == "as close as the job's" and found.pays_after == 40


def test_a_patch_is_kept_with_the_hashes_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(LOOP)
    dose = Dose(name="rows-at-once", value="model.py:6")
    (found,), diff = keep_patches([dose], lambda dose: keep(tried(dose), checked="right"))
    assert found.file == "model.py" and found.sha256 == sha256(LOOP) != found.patched_sha256
    assert "+    return x[torch.tensor(" in diff and Path("model.py").read_text() == LOOP
    assert keep_patches([], lambda dose: keep(tried(dose), checked="")) == ((), "")
