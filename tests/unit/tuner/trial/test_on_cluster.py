"""Trials on a cluster: what runs ahead, what is cancelled, and what a tuning is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.hardware.ray_cluster import RayCluster
from flatout.tuner.search.tune import Tuner
from flatout.tuner.treatment import Dose
from flatout.tuner.trial import on_cluster
from flatout.tuner.trial.journal import Journal
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trial.on_cluster import (
    QUEUED,
    ClusterTrials,
    TrialsAnswer,
    TrialsJob,
    describe_machine,
    run_unit,
)
from flatout.tuner.trials import AHEAD, TrialPlan, Unit, pair_of
from tests.support.fake_ray import FakeRay
from tests.unit.tuner.search.test_tune import GivenTrials, answers, tuned
from tests.unit.tuner.test_treatment import evidence
from tests.unit.tuner.test_verdict import trial

A, B, C = ([Dose(name=name, value=True)] for name in "abc")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay([(1, 0), (1, 0)]).install(monkeypatch)


@pytest.fixture
def trials(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterTrials]:
    monkeypatch.setattr(on_cluster, "run_unit", step_per_treatment)
    with RayCluster("auto") as cluster, cluster_trials(cluster, tmp_path) as made:
        yield made


def cluster_trials(cluster: RayCluster, folder: Path, *, resume: bool = False) -> ClusterTrials:
    journal = Journal(folder / "journal.jsonl", job={}, resume=resume)
    return ClusterTrials(cluster, ["train.py"], module=False, plan=TrialPlan(), journal=journal)


def step_per_treatment(job: TrialsJob, unit: Unit) -> TrialsAnswer:
    results = tuple(trial(0.1 * (1 + len(doses))) for doses, _ in unit)
    files = {changes["first_step"]: b"gradients" for _, changes in unit if "first_step" in changes}
    return TrialsAnswer(kind="one kind", results=results, files=files)


def units_of(ray: FakeRay) -> list[Unit]:
    """What was started and not cancelled, in its order."""
    return [task.arguments[2][1] for task in ray.started if not task.is_cancelled]


def test_what_is_expected_runs_ahead_and_once(ray: FakeRay, trials: ClusterTrials) -> None:
    pair = pair_of([], A)
    trials.expect("a", [pair, pair_of(A, []), pair])
    trials.expect("b", [pair, pair])  # which are under way
    assert len(ray.started) == 3 and trials.slots == 2
    plain, treated = trials.run_pairs([pair_of([], A)])[0]
    assert (plain.blocks_s[0], treated.blocks_s[0]) == (0.1, 0.2)
    trials.run_pairs([pair_of(A, [])])[0]
    trials.run_pairs([pair_of([], A)])[0]
    assert len(ray.started) == 3 and trials.num_run == 6
    trials.run_pairs([pair_of([], A)])[0]
    assert len(ray.started) == 4


def test_what_is_not_asked_for_any_more_is_cancelled(ray: FakeRay, trials: ClusterTrials) -> None:
    trials.expect("a", [pair_of([], A)])
    trials.expect("b", [pair_of([], A), pair_of([], B)])
    trials.forget("a")
    assert len(units_of(ray)) == 2  # the first is expected for another reason, too
    trials.run_pairs([pair_of([], A)])[0]
    trials.forget()
    assert units_of(ray) == [pair_of([], A)]  # it had ended


def test_what_is_expected_takes_the_place_of_what_was(ray: FakeRay, trials: ClusterTrials) -> None:
    trials.expect(AHEAD, [pair_of([], A), pair_of([], B)])
    trials.expect("b", [pair_of([], B)])
    trials.expect(AHEAD, [pair_of([], C)])
    assert units_of(ray) == [pair_of([], B), pair_of([], C)]
    trials.forget("b")
    assert units_of(ray) == [pair_of([], C)]


def test_few_trials_run_before_one_that_is_needed(ray: FakeRay, trials: ClusterTrials) -> None:
    """Ray runs tasks in their order: it gets no more than it can run next, and what is needed goes first."""
    likely = [pair_of(A, [*A, *B] * number) for number in range(1, 10)]
    trials.expect(AHEAD, likely)
    assert units_of(ray) == likely[: QUEUED * trials.slots]
    trials.expect("c", [pair_of([], C), pair_of(C, [])])
    trials.run_pairs([pair_of([], C)])[0]  # asked for
    assert units_of(ray)[QUEUED * trials.slots :][:2] == [pair_of([], C), pair_of(C, [])]
    ray.rooms.append((1, 0))  # a node joins
    trials.run_pairs([pair_of(C, [])])[0]
    given = [task for task in ray.started if not task.has_run]
    assert len(given) + 1 == QUEUED * trials.slots == 6  # one has just ended


def test_a_run_of_blocks_is_known_however_long_it_may_take(ray: FakeRay, trials: ClusterTrials) -> None:
    """What is left of the time sets its seconds, which are others when it is asked for."""
    trials.expect(AHEAD, [((tuple(A), {"arms": tuple(B), "seconds": 30.0}),)])
    trials.run(A, arms=tuple(B), seconds=20.0)
    assert len(ray.started) == 1


def test_every_answer_is_written_down_as_a_whole_when_it_comes(
    ray: FakeRay, tmp_path: Path, trials: ClusterTrials
) -> None:
    trials.expect("a", [pair_of([], A), pair_of([], B)])
    trials.run(C)  # others end meanwhile
    known = Journal(tmp_path / "journal.jsonl", job={}, resume=True)
    assert known.num_known == 3
    with RayCluster("auto") as cluster, cluster_trials(cluster, tmp_path, resume=True) as again:
        before = len(ray.started)
        again.expect("a", [pair_of([], A), pair_of([], B)])
        assert again.run_pairs([pair_of([], B)])[0][1].blocks_s[0] == 0.2
        assert len(ray.started) == before


def test_a_file_of_a_trial_travels_and_is_asked_for_each_time(trials: ClusterTrials, tmp_path: Path) -> None:
    path = tmp_path / "first.safetensors"
    for _ in range(2):
        path.unlink(missing_ok=True)
        trials.run([], first_step=str(path), plain=True)
        assert path.read_bytes() == b"gradients"


def test_a_node_of_another_kind_gets_no_more_tasks(
    ray: FakeRay, trials: ClusterTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    trials.on_progress = said.append
    kinds = iter(["one kind", "another", "one kind"])
    monkeypatch.setattr(
        on_cluster, "run_unit", lambda job, unit: replace(step_per_treatment(job, unit), kind=next(kinds))
    )
    assert trials.run([]).blocks_s and trials.run(A).blocks_s
    assert said == ["a node is left out: it has another; others have one kind"]
    assert "!in(node-" in str(ray.started[-1].options["label_selector"])


def test_a_tuning_comes_to_the_same_end_as_on_one_machine(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.tuner.results.machine.measure_apart", lambda: (1e-6, None))

    def result(names: set[str]) -> TrialResult:
        step_s = 0.1 / (2 if "loader-workers 2" in names else 1) / (1.5 if "threads 1" in names else 1)
        if any(name.startswith("compile") for name in names):
            return trial(ended="crashed", error="RuntimeError: no compiler")
        return trial(step_s)

    given = GivenTrials(tmp_path, result)

    def answer(job: TrialsJob, unit: Unit) -> TrialsAnswer:
        files: dict[str, bytes] = {}
        results = []
        for doses, changes in unit:
            wanted = changes.get("first_step")
            results.append(given.run(doses, **changes))
            if wanted:
                files[wanted] = Path(wanted).read_bytes()
        return TrialsAnswer(kind="one kind", results=tuple(results), files=files)

    ahead: set[str] = set()
    foreseen: list[bool] = []
    expect, run_asked = ClusterTrials.expect, ClusterTrials._run_unit

    def expect_and_note(trials: ClusterTrials, label: str, units: Sequence[Unit]) -> None:
        ahead.update(trials._key(trials._whole(unit)) for unit in units if label == AHEAD)
        expect(trials, label, units)

    def run_and_note(trials: ClusterTrials, unit: Unit) -> tuple[TrialResult, ...]:
        if any(doses for doses, _ in unit):  # not the job itself
            foreseen.append(trials._key(trials._whole(unit)) in ahead)
        return run_asked(trials, unit)

    monkeypatch.setattr(on_cluster, "run_unit", answer)
    monkeypatch.setattr(ClusterTrials, "expect", expect_and_note)
    monkeypatch.setattr(ClusterTrials, "_run_unit", run_and_note)
    with RayCluster("auto") as cluster:
        tuner = Tuner(
            evidence(),
            ["train.py"],
            module=False,
            allow_lossy=False,
            on_progress=lambda message: None,
            journal=Journal(tmp_path / "journal.jsonl", job={}),
            cluster=cluster,
        )
        done = tuner.run()
    alone = tuned(tmp_path, result)
    assert answers(done) == answers(alone)
    assert {str(dose) for dose in done.prescription.doses()} == {"loader-workers 2", "threads 1"}
    assert done.prescription.machine == alone.prescription.machine
    pairs = [task.arguments[2][1] for task in ray.started if len(task.arguments[2]) == 2]
    assert sum(len(unit) == 2 for unit in pairs) >= 6  # both arms of a pair are one task
    assert any(task.is_cancelled for task in ray.started), "nothing ran ahead"
    assert foreseen.count(True) > 0.7 * len(foreseen), "too little was announced"


def test_a_node_runs_the_trials_of_a_unit_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Recorded(on_cluster.Trials):
        def run(self, doses: Sequence[Dose], **changes: Any) -> TrialResult:
            asked.append((tuple(doses), sorted(changes)))
            if "first_step" in changes:
                Path(changes["first_step"]).write_bytes(b"here")
            return trial(0.1)

    monkeypatch.setattr(on_cluster, "Trials", Recorded)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    job = TrialsJob(command=("train.py",), module=False, plan=TrialPlan(), ranks=1, threads=None)
    wanted = str(tmp_path / "elsewhere.safetensors")
    answer = run_unit(job, ((tuple(A), {}), ((), {"first_step": wanted})))
    assert asked == [(tuple(A), []), ((), ["first_step"])] and len(answer.results) == 2
    assert answer.files == {wanted: b"here"} and answer.kind == describe_machine()
    assert "OMP_NUM_THREADS" not in on_cluster.os.environ
    assert not Path(wanted).exists()
