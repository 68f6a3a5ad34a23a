from __future__ import annotations

import json
from pathlib import Path

import pytest

import flatout
from flatout.planner.plan import PlanOptions, fit_config, plan_config
from tests.support import planner as plans

ON_24GB = PlanOptions(model="pkg:build", gpu_memory="24GB")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return plans.write_curriculum(tmp_path)


def test_both_documents_say_what_they_are_and_of_what(conf: Path) -> None:
    make = plans.toy_maker()
    shown = plan_config(conf, ON_24GB, make_forecast=make).to_json()
    fitted = fit_config(conf, ON_24GB, make_forecast=make).to_json()
    for document, name in ((shown, "flatout-plan"), (fitted, "flatout-fit")):
        assert (document["format"], document["version"]) == (name, 1)
        assert document["flatout_version"] == flatout.__version__
        assert (document["config"], document["model"]) == (str(conf / "config.yaml"), "pkg:build")
        assert document["usable_bytes"] == int(23028 * 2**20 * 0.85)
        assert document["lengths"] is None
        assert document["expandable_segments"]["value"] is False
        json.dumps(document, allow_nan=False, default=str)


def test_a_plan_says_whether_it_found_something(conf: Path) -> None:
    shown = plan_config(conf, ON_24GB, make_forecast=plans.toy_maker()).to_json()
    assert shown["has_findings"] is True
    unknown = plan_config(conf, PlanOptions()).to_json()
    assert (unknown["has_findings"], unknown["usable_bytes"], unknown["model"]) == (False, None, None)
    assert "--model" in unknown["missing"]


def test_a_fit_has_every_stage_and_evaluation(conf: Path) -> None:
    fitted = fit_config(conf, ON_24GB, make_forecast=plans.toy_maker()).to_json()
    (group,) = fitted["groups"]
    first = group["suggestions"][0]
    assert set(first["peaks"]) == {"01_stage", "02_stage"}
    assert first["peak"] == first["peaks"][first["worst_stage"]]
    assert group["evaluation"]["peak"]["process_bytes"] > 0
    assert fitted["chosen"] == ["largest batch"]


def test_lengths_are_told_for_the_batch_that_is_chosen(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("10\n20\n40\n")
    options = PlanOptions(model="pkg:build", gpu_memory="24GB", lengths=tmp_path / "lengths.txt")
    make = plans.toy_maker(sizes={"batch_size": 8, "n_negatives": 1, "length": 16})
    fitted = fit_config(conf, options, make_forecast=make)
    document = fitted.to_json()["lengths"]
    assert document["longest"] == 40
    assert [found["batch_size"] for found in document["batches"]] == fitted.batch_sizes
    assert fitted.fit.settings.stages[0].sizes["length"].value == 40
