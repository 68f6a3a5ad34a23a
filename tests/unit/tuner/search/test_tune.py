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
from flatout.tuner.patches.patch import sha256
from flatout.tuner.results.machine import Machine, machine_of
from flatout.tuner.results.outcome import Tuning
from flatout.tuner.search import candidates
from flatout.tuner.search import tune as tuning
from flatout.tuner.search.plan import plan_of
from flatout.tuner.search.tune import Tuner
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.switched import ArmResult
from flatout.tuner.trials import TrialRun, Trials, Unit
from tests.unit.tuner.patches.test_patch import LOOP
from tests.unit.tuner.patches.test_patch import finding as found_at
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
        self.expected: list[tuple[str, list[Unit]]] = []
        self.always: dict[str, Any] = {}
        self.ends_s = math.inf

    def __enter__(self) -> GivenTrials:
        return self

    def __exit__(self, *_: object) -> None: ...

    slots = at_once = 1
    plan = plan_of(0.1)

    def expect(self, label: str, units: Sequence[Unit]) -> None:
        self.expected.append((label, list(units)))

    def forget(self, label: str | None = None) -> None: ...

    def machine(self, evidence: Evidence) -> Machine:
        return machine_of(evidence)

    def run_pairs(self, pairs: Sequence[Unit]) -> list[tuple[TrialResult, ...]]:
        return [tuple(self.run(doses, **changes) for doses, changes in pair) for pair in pairs]

    def run_all(self, runs: Sequence[TrialRun]) -> list[TrialResult]:
        return [self.run(doses, **changes) for doses, changes in runs]

    def run(self, doses: Sequence[Dose], *, first_step: str | None = None, **options: Any) -> TrialResult:
        self.num_run += 1
        if first_step is not None:
            import torch
            from safetensors.torch import save_file

            save_file({"gradient.0": torch.ones(2, dtype=torch.float64)}, first_step)
        if arms := options.get("arms"):
            names = {str(dose) for dose in doses}
            plain_s = self._result(names).blocks_s[0]
            gains = {str(arm): plain_s / self._result({*names, str(arm)}).blocks_s[0] for arm in arms}
            shown = [
                ArmResult(label=label, ratio=gain, low=gain / 1.01, high=gain * 1.01, num_blocks=5)
                for label, gain in {"same": 1.0, **gains}.items()
            ]
            return replace(self._result(names), arms=tuple(shown), blocks_s=())
        result = self._result({str(dose) for dose in doses})
        noise = math.exp(self._random.gauss(0, 0.005))  # runs differ a little
        return replace(result, blocks_s=tuple(each * noise for each in result.blocks_s))


def tuned(
    tmp_path: Path, result: Callable[[set[str]], TrialResult], known: Evidence | None = None, **options: Any
) -> Tuning:
    tuner = Tuner(
        known or evidence(), ["train.py"], module=False,
        **{"allow_lossy": False, "on_progress": lambda message: None, **options},
    )  # fmt: skip
    tuner.times.trials = GivenTrials(tmp_path, result)  # type: ignore[assignment]
    return tuner.run()


def answers(done: Tuning) -> dict[str, str]:
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
    assert {str(dose) for dose in done.prescription.doses()} == {"loader-workers 2", "threads 1"}
    assert done.total is not None and done.total.ratio == pytest.approx(3.0, rel=0.05)
    proof = done.prescription.proof
    assert proof is not None and proof.low > 2.5 and proof.noise_low < 1 < proof.noise_high
    assert done.reproducible and done.noise_in_run is not None and 1.03 < done.smallest_gain < 1.1
    in_one_run = {each.name for each in done.tried if each.in_one_run}
    assert in_one_run == {"threads", "garbage-every", "fused-optimizer"}  # others need processes of their own
    machine = done.prescription.machine
    assert machine is not None and (machine.device, machine.cores, machine.launch_s) == ("cpu", 2, 1e-6)


def test_an_epoch_does_not_show_a_gain_that_begins_with_the_second(tmp_path: Path) -> None:
    for name, shows in (("kept-samples", False), ("loader-workers", True)):

        def result(names: set[str], name: str = name) -> TrialResult:
            step_s = 0.05 if any(each.startswith(name) for each in names) else 0.1
            return trial(step_s, before_s=1.0, num_steps_before=2)

        done = tuned(tmp_path, result, only=[f"{name}=1"])
        assert [each.name for each in done.prescription.treatments] == [name]
        (tried,) = done.tried
        for job in (done.job, tried.job):
            assert job is not None and (job.ratio is not None) == shows


def test_a_treatment_that_another_makes_needless_is_dropped_again(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        if "loader-workers 2" in names:
            return trial(0.02)
        return trial(0.05 if "garbage-every 100" in names else 0.1)

    done = tuned(tmp_path, result, only=["garbage-every", "loader-workers=2"])
    assert answers(done)["garbage-every 100"] == "dropped again"
    assert [str(dose) for dose in done.prescription.doses()] == ["loader-workers 2"]


def test_what_gains_in_blocks_and_not_in_whole_runs_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(names: set[str]) -> TrialResult:
        return trial(0.05 if "garbage-every 100" in names else 0.1)

    real = GivenTrials.run

    def run(self: GivenTrials, doses: Sequence[Dose], **options: Any) -> TrialResult:
        return real(self, doses if options.get("arms") else [], **options)

    monkeypatch.setattr(GivenTrials, "run", run)
    done = tuned(tmp_path, result, only=["garbage-every"])
    (tried,) = done.tried
    assert tried.in_one_run and tried.gain is not None and tried.gain.ratio == pytest.approx(2.0)
    assert tried.answer == "undecided" and "whole runs with everything kept show no gain" in tried.reason
    assert done.total is None and done.job is None and not done.prescription.doses()


def test_what_another_fault_hid_is_tried_again_once_that_is_gone(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        waits_s = 0.01 if "loader-workers 2" in names else 0.1
        return trial(max(waits_s, 0.02 if "garbage-every 100" in names else 0.05))

    done = tuned(tmp_path, result, only=["garbage-every", "loader-workers=2"])
    assert {str(dose) for dose in done.prescription.doses()} == {"garbage-every 100", "loader-workers 2"}
    assert done.total is not None and done.total.ratio == pytest.approx(5.0, rel=0.05)


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
        seed = 1e-3 * len(seeds)
        seeds.append(1)
        late = 0.8001 if "autocast bfloat16" in names else 0.8
        return trial(0.05 if late > 0.8 else 0.1, losses=(1.0 + seed, 0.9, late))

    seeds: list[int] = []

    known = on_gpu()
    assert answers(tuned(tmp_path, result, known, only=["autocast"])) == {"autocast bfloat16": "not tried"}
    done = tuned(tmp_path, result, known, only=["autocast"], allow_lossy=True)
    assert answers(done) == {"autocast bfloat16": "kept"}
    assert "late losses change by +0.01%" in done.prescription.treatments[0].checked


def test_nothing_is_tried_when_the_time_is_up(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        return trial(0.05 if "threads 1" in names else 0.1)

    done = tuned(tmp_path, result, only=["threads=1", "garbage-every", "loader-workers=2"], within_s=0.0)
    shown = {str(each): (each.answer, each.reason) for each in done.tried}
    late = ("not tried", "no time was left for it")
    assert shown == {"threads 1": late, "loader-workers 2": late, "garbage-every 100": late}
    assert done.total is None and done.num_trials == 4  # the job against itself
    assert done.noise.num_pairs == 2 and "there was no time" in done.why_nothing()
    assert answers(tuned(tmp_path, result, only=["threads=1"], within_s=1e6)) == {"threads 1": "kept"}


def test_no_other_value_is_tried_where_one_gains_all_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ceilings_of", lambda known: {"loader-bound": 2.0})

    def result(names: set[str]) -> TrialResult:
        return trial(0.05 if any(name.startswith("loader-workers") for name in names) else 0.1)

    found = answers(tuned(tmp_path, result, only=["loader-workers"]))
    assert sorted(found.values()) == ["kept", *["not tried"] * (len(found) - 1)] and len(found) > 1


def test_another_value_runs_beside_one_that_pays_and_replaces_it_if_it_gains_more(tmp_path: Path) -> None:
    def result(names: set[str]) -> TrialResult:
        for count, step_s in ((1, 0.02), (2, 0.04), (4, 0.05)):
            if f"loader-workers {count}" in names:
                return trial(step_s)
        return trial(0.1)

    done = tuned(tmp_path, result, only=["loader-workers"])
    found = {str(each): (each.answer, each.reason) for each in done.tried}
    assert found["loader-workers 1"][0] == "kept"
    assert found["loader-workers 2"] == ("no gain", "loader-workers 1 gains more")
    assert found["loader-workers 4"] == ("not tried", "loader-workers 1 gains more than a value between them")
    assert done.total is not None and done.total.ratio == pytest.approx(5.0, rel=0.05)
    (kept,) = done.prescription.treatments
    assert kept.ratio == pytest.approx(5.0, rel=0.05)

    def first(names: set[str]) -> TrialResult:
        return trial(0.05 if "loader-workers 2" in names else 0.1)

    done = tuned(tmp_path, first, only=["loader-workers"])
    found = {str(each): (each.answer, each.reason) for each in done.tried}
    assert found["loader-workers 1"] == ("no gain", "loader-workers 2 gains as much or more")
    hurried = answers(tuned(tmp_path, first, only=["loader-workers"], within_s=1e6))
    assert hurried == answers(done)


def test_a_large_cause_goes_before_what_it_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for ceiling, is_first in ((5.0, True), (1.1, False)):
        monkeypatch.setattr(tuning, "ceilings_of", lambda known, most=ceiling: {"loader-bound": most})
        said.clear()
        tuned(
            tmp_path,
            lambda names: trial(0.02 if "loader-workers 2" in names else 0.1),
            only=["garbage-every", "loader-workers=2"],
            on_progress=said.append,
        )
        tried = [text for text in said if "in one run" in text or "loader-workers" in text]
        assert ("loader-workers" in tried[0]) is is_first
        assert sum("in one run" in text for text in said) == (1 if is_first else 2)


def test_a_job_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    hints = {"finished": "give it more epochs", "crashed": "without flatout"}
    for ended, hint in hints.items():
        with pytest.raises(BadInput, match=r"ended after 3 steps|raised") as raised:
            tuned(tmp_path, lambda names, ended=ended: trial(ended=ended, error="ValueError: x"))  # type: ignore[misc]
        assert hint in str(raised.value.hint)
    with pytest.raises(BadInput, match="raised EOFError") as raised:
        tuned(tmp_path, lambda names: trial(ended="crashed", error="EOFError: EOF when reading a line"))
    assert "give the script its answers as arguments" in str(raised.value.hint)
    with pytest.raises(BadInput, match="ended after 0 steps") as raised:
        tuned(tmp_path, lambda names: trial(ended="finished", num_steps=0))
    assert raised.value.hint == "it must train: no step of an optimizer was seen"
    with pytest.raises(BadInput, match="no step"):
        tuned(tmp_path, lambda names: trial(), evidence(steps=()))
    with pytest.raises(BadInput, match="no treatment 'magic'"):
        tuned(tmp_path, lambda names: trial(), only=["magic"])


def test_the_largest_ceiling_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ceilings_of", lambda known: {"launch-bound-step": 1.5, "loader-bound": 1.2})

    def result(names: set[str]) -> TrialResult:
        return trial(0.1 / (1.3 if "threads 1" in names else 1.0))

    done = tuned(tmp_path, result, only=["compile", "loader-workers", "threads", "garbage-every"])
    order = list(dict.fromkeys(each.name for each in done.tried))
    assert order == ["compile", "threads", "loader-workers", "garbage-every"]


def test_a_run_of_switched_treatments_that_fails_costs_only_that_run(tmp_path: Path) -> None:
    class Hanging(GivenTrials):
        def run(self, doses: Sequence[Dose], **options: Any) -> TrialResult:
            if options.get("arms"):
                return trial(ended="killed", error="did not end within 60 s")
            return super().run(doses, **options)

    tuner = Tuner(
        evidence(), ["train.py"], module=False, on_progress=lambda message: None, allow_lossy=False,
        only=["threads=1"],
    )  # fmt: skip
    tuner.times.trials = Hanging(tmp_path, lambda names: trial(0.05 if names else 0.1))  # type: ignore[assignment]
    assert answers(tuner.run()) == {"threads 1": "kept"}


def test_a_crashed_job_is_not_a_gain_of_nothing(tmp_path: Path) -> None:
    """A baseline that crashes is refused, whatever the treatments do."""

    def result(names: set[str]) -> TrialResult:
        return trial(0.01) if names else trial(ended="crashed", error="ValueError: x", blocks_s=())

    with pytest.raises(BadInput, match="raised ValueError: x"):
        tuned(tmp_path, result)
    with pytest.raises(BadInput, match="no step was timed"):
        tuned(tmp_path, lambda names: trial(blocks_s=()))


def test_an_interrupted_tuning_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    ran: list[str] = []
    interrupted_at: int | None = None

    def run(self: Trials, doses: Sequence[Dose], **changes: Any) -> TrialResult:
        ran.append(str(doses))
        if len(ran) == interrupted_at:
            raise KeyboardInterrupt
        return trial(0.05 if doses else 0.1)

    def tune(*, resume: bool) -> tuple[list[str], list[str]]:
        ran.clear()
        told: list[str] = []
        given = {"only": ["loader-workers=2"], "resume": resume, "on_progress": told.append}
        done = tuning.tune(evidence(), ["train.py"], **given)  # type: ignore[arg-type]
        assert [each.answer for each in done.tried] == ["kept"]
        assert not (tmp_path / ".flatout").exists()  # nothing is left to resume
        return list(ran), told

    monkeypatch.setattr(Trials, "_run", run)
    whole, _ = tune(resume=False)
    for source, num_again in (("", len(whole) - 7), ("changed = True", len(whole))):
        (tmp_path / "train.py").write_text("")
        interrupted_at = 8
        with pytest.raises(KeyboardInterrupt):
            tune(resume=False)
        interrupted_at = None
        (tmp_path / "train.py").write_text(source)
        again, told = tune(resume=True)
        assert again == whole[len(whole) - num_again :], source
        assert told[0] == ("nothing to resume" if source else "7 trials are already finished")


def test_a_patch_is_tried_like_a_treatment_and_shown_as_a_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(LOOP)
    monkeypatch.setattr(candidates, "examine", lambda known: [found_at("model.py", 6)])

    def result(names: set[str]) -> TrialResult:
        if "unbound-rows model.py:6" in names:
            return trial(0.01, losses=(1.0, 0.9, 0.7))
        return trial(0.02 if "rows-at-once model.py:6" in names else 0.1)

    known = evidence(sources={"model.py": {}})
    assert "rows-at-once model.py:6" not in answers(tuned(tmp_path, result, known, only=["threads"]))
    done = tuned(tmp_path, result, known, patch=True, only=["rows-at-once", "one-gather", "threads"])
    found = answers(done)
    assert found["rows-at-once model.py:6"] == "kept" and found["one-gather model.py:6"] == "not tried"
    assert "+    return x[torch.tensor(" in done.diff and Path("model.py").read_text() == LOOP
    (kept,) = done.prescription.patches
    assert (kept.file, kept.sha256) == ("model.py", sha256(LOOP)) and kept.low > 4
    assert not done.prescription.treatments and done.total is not None


def test_a_treatment_that_was_asked_for_and_does_not_suit_the_job_is_told(tmp_path: Path) -> None:
    done = tuned(tmp_path, lambda names: trial(blocks_s=(0.1,) * 5), only=["no-sync"])
    (only,) = done.tried
    assert only.answer == "not tried" and "--only no-sync=VALUE" in only.reason


@pytest.mark.parametrize("within_s", [60.0, 100.0, 150.0, 200.0, 400.0])
def test_everything_ends_in_time_with_the_runs_of_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    """Each trial takes 10 s; all but two pairs of the job itself fit into the time."""
    clock = [0.0]
    monkeypatch.setattr("flatout.tuner.search.times.time.monotonic", lambda: clock[0])

    def result(names: set[str]) -> TrialResult:
        clock[0] += 10.0
        return trial(0.1 / (1.2 if "threads 1" in names else 1) / (1.5 if "loader-workers 2" in names else 1))

    done = tuned(tmp_path, result, only=["threads=1", "garbage-every", "loader-workers=2"], within_s=within_s)
    assert clock[0] <= within_s
    if within_s >= 400:
        assert done.total is not None and done.total.ratio == pytest.approx(1.8, rel=0.05)
