"""What is kept, dropped and told, with trials whose results are given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.errors import BadInput
from flatout.measure.evidence import Evidence
from flatout.tuner import tune as tuning
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.tune import Tuner, plan_of, source_of
from tests.unit.tuner.test_treatment import evidence, on_gpu
from tests.unit.tuner.test_verdict import trial


@pytest.fixture(autouse=True)
def no_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.tuner.results.machine.measure_apart", lambda: (1e-6, None))


class GivenTrials:
    """Trials whose results a function gives, by the names of the treatments."""

    def __init__(self, folder: Path, result: Callable[[set[str]], TrialResult]) -> None:
        self.folder, self._result, self.num_run = folder, result, 0
        self._random = random.Random(1)

    def __enter__(self) -> GivenTrials:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, doses: Sequence[Dose], *, first_step: str | None = None, **_: Any) -> TrialResult:
        self.num_run += 1
        if first_step is not None:
            import torch
            from safetensors.torch import save_file

            save_file({"gradient.0": torch.ones(2, dtype=torch.float64)}, first_step)
        result = self._result({str(dose) for dose in doses})
        noise = math.exp(self._random.gauss(0, 0.005))  # runs differ a little
        return replace(result, blocks_s=tuple(each * noise for each in result.blocks_s))


def tuned(
    tmp_path: Path, result: Callable[[set[str]], TrialResult], known: Evidence | None = None, **options: Any
) -> tuning.Tuning:
    tuner = Tuner(
        known or evidence(), ["train.py"], module=False, on_progress=lambda message: None,
        **{"allow_lossy": False, **options},
    )  # fmt: skip
    tuner.trials = GivenTrials(tmp_path, result)  # type: ignore[assignment]
    return tuner.run()


def answers(done: tuning.Tuning) -> dict[str, str]:
    return {f"{each.name} {each.value}": each.answer for each in done.tried}


def test_what_pays_is_kept_with_its_proof_and_the_rest_says_why_not(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        step_s = 0.1
        if "loader-workers 2" in names:
            step_s /= 2
        if "loader-workers 4" in names:
            step_s /= 1.2
        if "threads 1" in names:
            step_s /= 1.5
        if any(name.startswith("compile") for name in names):
            return trial(ended="crashed", error="RuntimeError: no compiler")
        return trial(step_s)

    done = tuned(tmp_path, result)
    found = answers(done)
    assert found["loader-workers 2"] == found["threads 1"] == "kept"
    assert found["loader-workers 4"] == found["garbage-every 100"] == "no gain"
    assert found["compile default"] == "failed"
    assert [str(dose) for dose in done.prescription.doses()] == ["loader-workers 2", "threads 1"]
    assert done.total is not None and done.total.ratio == pytest.approx(3.0, rel=0.05)
    proof = done.prescription.proof
    assert proof is not None and proof.low > 2.5 and proof.noise_low < 1 < proof.noise_high
    assert done.reproducible
    machine = done.prescription.machine
    assert machine is not None and (machine.device, machine.cores, machine.launch_s) == ("cpu", 2, 1e-6)


def test_a_treatment_that_another_makes_needless_is_dropped_again(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        if "threads 1" in names:
            return trial(0.02)
        return trial(0.05 if "garbage-every 100" in names else 0.1)

    done = tuned(tmp_path, result, only=["garbage-every", "threads"])
    assert answers(done)["garbage-every 100"] == "dropped again"
    assert [str(dose) for dose in done.prescription.doses()] == ["threads 1"]


def test_wrong_numbers_are_never_kept_however_fast(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        if "garbage-every 100" in names:
            return trial(0.01, losses=(1.0, 0.9, 0.7999))
        if "threads 1" in names:
            return trial(0.01, losses=(1.0, 0.95, 0.8))
        return trial(0.1)

    done = tuned(tmp_path, result, only=["garbage-every", "threads"])
    assert {found for name, found in answers(done).items() if name != "threads 2"} == {"wrong numbers"}
    assert done.total is None and not done.prescription.treatments and done.prescription.proof is None


def test_lossy_treatments_wait_to_be_asked_for(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        return trial(0.05, losses=(1.0, 0.9, 0.8001)) if "autocast bfloat16" in names else trial(0.1)

    known = on_gpu()
    assert answers(tuned(tmp_path, result, known, only=["autocast"])) == {"autocast bfloat16": "not tried"}
    done = tuned(tmp_path, result, known, only=["autocast"], allow_lossy=True)
    assert answers(done) == {"autocast bfloat16": "kept"}
    assert "late losses change by +0.01%" in done.prescription.treatments[0].checked


def test_a_job_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ended after 3 steps"):
        tuned(tmp_path, lambda names: trial(ended="finished"))
    with pytest.raises(BadInput, match="no step"):
        tuned(tmp_path, lambda names: trial(), evidence(steps=()))
    with pytest.raises(BadInput, match="no treatment 'magic'"):
        tuned(tmp_path, lambda names: trial(), only=["magic"])


def test_trials_are_as_long_as_their_steps_need() -> None:
    assert plan_of(0.001).block_steps == 50
    assert plan_of(5.0).block_steps == 2 and plan_of(5.0).limit_s > 5 * plan_of(5.0).num_steps


def test_the_source_is_that_of_the_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import model")
    (tmp_path / "model.py").write_text("torch.cuda.empty_cache()")
    known = evidence(sources={"model.py": {}, "gone.py": {}})
    assert "empty_cache" in source_of(known, ["train.py"])
