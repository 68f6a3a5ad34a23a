"""What is tried on a job, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.tuner.search import candidates
from flatout.tuner.search.candidates import (
    by_ceiling,
    find_patches,
    find_treatments,
    source_of,
    switchable,
    why_not_together,
)
from flatout.tuner.treatment import Dose, all_treatments
from flatout.tuner.verdict import Gain
from tests.unit.tuner.patches.test_patch import LOOP
from tests.unit.tuner.patches.test_patch import finding as found_at
from tests.unit.tuner.test_treatment import evidence, on_gpu


def test_the_source_is_that_of_the_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import model")
    (tmp_path / "model.py").write_text("torch.cuda.empty_cache()")
    known = evidence(sources={"model.py": {}, "gone.py": {}})
    assert "empty_cache" in source_of(known, ["train.py"])


def test_what_is_left_out_has_its_reason() -> None:
    asked = {"autocast": True, "no-sync": True, "threads": 3}
    found, left_out = find_treatments(on_gpu(), ["train.py"], only=asked, allow_lossy=False)
    assert [(treatment.name, values) for treatment, values in found] == [("threads", [3])]
    assert {dose.name: reason.partition(":")[0] for dose, reason in left_out} == {
        "autocast": "it changes the numbers; --allow-lossy tries it",
        "no-sync": "nothing in this job calls for it",
    }
    found, left_out = find_treatments(on_gpu(), ["train.py"], only={"autocast": True}, allow_lossy=True)
    assert [treatment.name for treatment, _ in found] == ["autocast"] and not left_out


def test_what_was_shown_goes_before_ceilings_and_what_showed_nothing_last() -> None:
    asked = {"threads": 1, "loader-workers": 2, "garbage-every": 100, "channels-last": True}
    found, _ = find_treatments(evidence(), ["train.py"], only=asked, allow_lossy=False)
    shown = {
        label: Gain(ratio=ratio, low=ratio, high=ratio, num_pairs=5, best=ratio)
        for label, ratio in {"threads 1": 1.5, "garbage-every 100": 1.0}.items()
    }
    order = [each.name for each, _ in by_ceiling(found, in_run=shown, ceilings={"loader-bound": 1.2})]
    assert order == ["threads", "loader-workers", "channels-last", "garbage-every"]
    order = [each.name for each, _ in by_ceiling(found, in_run={}, ceilings={})]
    assert order == ["loader-workers", "channels-last", "garbage-every", "threads"]  # the last suit any job
    assert [str(dose) for dose in switchable(found)] == ["garbage-every 100", "threads 1"]


def test_a_cause_that_was_found_goes_before_what_a_job_shows_no_sign_of() -> None:
    found = [(all_treatments()[name], [True]) for name in ("no-debug-calls", "compile")]
    for rules, first in (((), "compile"), (("anomaly-detection-left-on",), "no-debug-calls")):
        order = [each.name for each, _ in by_ceiling(found, in_run={}, ceilings={}, found=rules)]
        assert order[0] == first


def test_what_gains_most_often_goes_first_if_nothing_is_known_of_it() -> None:
    asked = {"compile": "default", "channels-last": True, "fused-optimizer": True}
    found, _ = find_treatments(evidence(), ["train.py"], only=asked, allow_lossy=False)
    shown = {"fused-optimizer": Gain(ratio=1.05, low=1.04, high=1.06, num_pairs=5, best=1.05)}
    order = [each.name for each, _ in by_ceiling(found, in_run=shown, ceilings={})]
    assert order == ["compile", "fused-optimizer", "channels-last"]


def test_patches_of_one_line_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(LOOP)
    monkeypatch.setattr(candidates, "examine", lambda known: [found_at("model.py", 6)])
    known = evidence(sources={"model.py": {}})
    found, left_out = find_patches(known, ["model.py"], only={"rows-at-once": True, "one-gather": True})
    assert [values for _, values in found] == [["model.py:6"]]
    assert [str(dose) for dose, _ in left_out] == ["one-gather model.py:6"]
    asked = {"one-tensor": True, "rows-at-once": True, "threads": 1}
    found, left_out = find_patches(known, ["model.py"], only=asked)
    assert [treatment.name for treatment, _ in found] == ["rows-at-once"]
    assert [(str(dose), reason.partition(";")[0]) for dose, reason in left_out] == [
        ("one-tensor", "the diagnosis found no line for it")
    ]
    one, other = (Dose(name=name, value="model.py:6") for name in ("rows-at-once", "unbound-rows"))
    assert why_not_together([one]) is None and why_not_together([one, other])
    assert find_patches(known, ["model.py"], only={"threads": 1}) == ([], [])
