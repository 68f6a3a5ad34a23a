from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.api import apply_config, fit_config, plan_config, undo_config
from flatout.ground.errors import BadInput
from flatout.planner.forecast.load import ForecastRequest
from flatout.planner.plan import PlanOptions
from tests.support import planner as plans


def test_a_config_is_shown_without_a_model_or_a_device(tmp_path: Path) -> None:
    planned = plan_config(plans.write_curriculum(tmp_path))
    assert [stage.verdict for stage in planned.overview.stages] == ["unknown", "unknown"]
    assert planned.missing is not None and "--model" in planned.missing
    document = json.loads(json.dumps(planned.to_json(), allow_nan=False, default=str))
    assert (document["format"], document["version"]) == ("flatout-plan", 1)


def test_a_config_is_fitted_written_and_taken_back(tmp_path: Path) -> None:
    conf = plans.write_curriculum(tmp_path)
    before = plans.contents(conf)
    asked: list[ForecastRequest] = []

    def make_forecast(request: ForecastRequest) -> plans.ToyForecast:
        asked.append(request)
        return plans.ToyForecast()

    options = PlanOptions(
        model="pkg:build", gpu_memory="24GB", overrides=("model.lora.r=16",), ranks=2, profile=True
    )
    fitted = fit_config(conf, options, make_forecast=make_forecast)
    (request,) = asked
    assert (request.model, request.device.name, request.profile) == ("pkg:build", "24GB", True)
    assert request.overrides == {"model.lora.r": 16}
    assert (request.values["model.lora.r"], request.values["n_negatives"]) == (16, 24)
    assert plans.contents(conf) == before
    backup = apply_config(fitted)
    assert backup is not None and plans.contents(conf) != before
    again = fit_config(conf, options, make_forecast=plans.toy_maker())
    assert apply_config(again) is None
    assert again.fit.groups[0].suggestion(None).effective_batches == {"01_stage": 128, "02_stage": 128}
    assert undo_config(conf) == backup
    assert plans.contents(conf) == before
    document = json.loads(json.dumps(fitted.to_json(), allow_nan=False, default=str))
    assert (document["format"], document["version"]) == ("flatout-fit", 1)
    assert document["usable_bytes"] == int(23028 * 2**20 * 0.85)


def test_a_config_that_does_not_say_its_model(tmp_path: Path) -> None:
    conf = plans.write_curriculum(tmp_path)
    with pytest.raises(BadInput, match=r"a fit needs the model .*flatout-plan.toml"):
        fit_config(conf, PlanOptions(gpu_memory="24GB"), make_forecast=plans.toy_maker())
    (conf / "flatout-plan.toml").write_text('model = "pkg:build"\n')
    fitted = fit_config(conf, PlanOptions(gpu_memory="24GB"), make_forecast=plans.toy_maker())
    assert fitted.fit.groups
