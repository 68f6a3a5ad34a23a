from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.api import (
    apply_config,
    compare_runs,
    diagnose,
    diagnose_evidence,
    diagnose_script,
    fit_config,
    plan_config,
    report_run,
    tune_script,
    undo_config,
    watch_script,
)
from flatout.doctor.examine import Diagnosis, examine
from flatout.ground.errors import BadInput, EvidenceUnreadable
from flatout.measure.evidence_file import decode_evidence, load_evidence, save_evidence
from flatout.planner.forecast.load import ForecastRequest
from flatout.planner.plan import PlanOptions
from tests.support import doctor as builders
from tests.support import planner as plans
from tests.support.measure import line_of, write_script
from tests.support.monitor import kept_run, story


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
    assert f"tests/unit/test_api.py:{line}" in {str(each.place) for each in diagnosis.findings}
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


def test_the_package_hands_these_out() -> None:
    assert flatout.diagnose is diagnose
    assert flatout.Diagnosis is Diagnosis


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
    with pytest.raises(BadInput, match=r"a fit needs to know the model .*flatout-plan.toml"):
        fit_config(conf, PlanOptions(gpu_memory="24GB"), make_forecast=plans.toy_maker())
    (conf / "flatout-plan.toml").write_text('model = "pkg:build"\n')
    fitted = fit_config(conf, PlanOptions(gpu_memory="24GB"), make_forecast=plans.toy_maker())
    assert fitted.fit.groups


def test_runs_are_reported_and_compared(tmp_path: Path) -> None:
    first = kept_run(tmp_path, story(seconds=60), pid=1)
    kept_run(tmp_path, story(seconds=60, step_s=0.2), pid=2)
    page = tmp_path / "run.html"
    summary = report_run(first, html=page)
    assert summary.step_s == pytest.approx(0.081, rel=0.02)
    assert page.exists()
    comparison = compare_runs(first, "train-2", root=tmp_path)
    assert comparison.differences[0].outcome == "worse"


def test_a_watched_script_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no script at"):
        watch_script([str(tmp_path / "absent.py")])


def test_a_tuning_starts_its_ranks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: started.append(command))
    with pytest.raises(BadInput, match="could not be diagnosed in several processes"):
        tune_script([str(script), "--lr", "1"], ranks=2)
    (command,) = started
    assert "--nproc-per-node=2" in command and command[-3:] == [str(script), "--lr", "1"]
    assert command[command.index("flatout") + 1] == "diagnose"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="starts its processes itself"):
        tune_script([str(script)])
