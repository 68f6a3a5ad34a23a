"""Trials of a real script: what they see, and what they leave behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.tuner import verdict
from flatout.tuner.child import ChildOptions, TrialOptions
from flatout.tuner.treatment import Dose
from flatout.tuner.trial.journal import Journal
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan, Trials, launches, pair_of
from tests.support.warm_python import warm

SCRIPT = """
import sys, time, torch
from torch import nn
mode = sys.argv[1] if len(sys.argv) > 1 else ""
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(7 if mode == "short" else 1000):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    if mode == "raises" and step == 3:
        raise ValueError("no more data")
    if mode == "waits":
        torch.cuda.synchronize()  # raises where there is no GPU
    if mode == "hangs" and step == 3:
        time.sleep(1000)
"""
PLAN = TrialPlan(warmup=2, blocks=3, block_steps=2, limit_s=60.0)


@pytest.fixture(autouse=True)
def warm_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm().bin / "python"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    (made / "train.py").write_text(SCRIPT)
    return made


@pytest.fixture
def trials(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    monkeypatch.chdir(folder)
    with Trials(["train.py"], module=False, plan=PLAN) as made:
        yield made
    assert not made.folder.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]  # checkpoints went elsewhere


def test_a_trial_repeats_under_an_exact_treatment(trials: Trials) -> None:
    first, second = trials.run([]), trials.run([Dose(name="garbage-every", value=2)])
    assert verdict.failure(first) is None and verdict.is_reproducible(first, second)
    assert len(first.blocks_s) == 3 and min(first.blocks_s) > 0
    assert first.num_steps == len(first.losses) == PLAN.num_steps == 9 and first.num_losses_at_start == 2
    assert verdict.differs_exactly(first, second) is None and sorted(first.checked) == ["1", "2", "9"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("raises", "raised ValueError: no more data"),
        ("short", "ended after 7 steps"),
        ("hangs", "did not end"),
    ],
)
def test_a_trial_that_fails_costs_that_trial(trials: Trials, mode: str, words: str) -> None:
    trials.command = ("train.py", mode)
    if mode == "hangs":
        trials.plan = replace(PLAN, limit_s=2.0)
    result = trials.run([])
    assert isinstance(result, TrialResult) and words in str(verdict.failure(result))


def test_a_trial_that_would_end_too_late_is_ended(trials: Trials) -> None:
    trials.command = ("train.py", "hangs")
    began_s = time.monotonic()
    trials.ends_s = began_s + 2.0
    assert "did not end" in str(verdict.failure(trials.run([])))
    assert time.monotonic() - began_s < PLAN.limit_s / 2


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory",
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
        "OSError: [Errno 28] No space left on device: '/torch_7'",
    ],
)
def test_trials_beside_each_other_leave_none_behind_and_one_without_memory_runs_again_alone(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    asked: list[int] = []

    def run(doses: Sequence[Dose], **changes: Any) -> TrialResult:
        asked.append(changes["seed"])
        if changes["seed"] == 1 and asked.count(1) == 1:
            return TrialResult(ended="crashed", error=error)
        return TrialResult(ended="measured", num_steps=changes["seed"])

    trials.at_once = 2
    with monkeypatch.context() as patch:
        patch.setattr(trials, "_run", run)
        found = trials.run_all([([], {"seed": seed}) for seed in range(3)])
    assert [each.num_steps for each in found] == [0, 1, 2] and sorted(asked) == [0, 1, 1, 2]

    def interrupted(asked: Future[TrialResult], timeout: float | None = None) -> TrialResult:
        while len(trials._started) < 2:  # both are under way
            time.sleep(0.01)
        raise KeyboardInterrupt

    trials.command = ("train.py", "hangs")
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trials.run_all([([], {}), ([], {})])
    assert not trials._started


def test_pairs_start_beside_each_other_and_take_their_steps_in_turn(trials: Trials, tmp_path: Path) -> None:
    told = "print(time.monotonic(), flush=True)"
    script = tmp_path / "tells.py"
    script.write_text(
        SCRIPT.replace("for step", f"{told}\nfor step").replace("torch.save", f"{told}\n    torch.save")
    )
    trials.command, trials.at_once = (str(script),), 3
    trials.journal = Journal(tmp_path / "journal", job={})
    magic = Dose(name="magic", value=True)
    pairs = [pair_of([], []), pair_of([magic], [])]  # three at once, then the last one
    (one, other), (broken, alone) = trials.run_pairs(pairs)
    assert [verdict.failure(run) for run in (one, other, alone)] == [None] * 3
    assert "magic" in str(verdict.failure(broken)) and verdict.is_reproducible(one, other)
    assert len(one.blocks_s) == PLAN.blocks and one.before_s is not None
    outputs = [trials.folder / str(number) / "output" for number in (1, 2, 3)]
    texts = [path.read_text() for path in outputs]
    spans = [list(map(float, text.split())) for text in texts if "magic" not in text]
    (first, second) = sorted(spans, key=lambda ends_s: ends_s[1])  # by the second step of each
    assert len(first) == len(second) == PLAN.num_steps  # the last step ends the script
    assert max(first[0], second[0]) < first[1] and first[-1] < second[1]
    trials.journal = Journal(tmp_path / "journal", job={}, resume=True)
    assert trials.run_pairs(pairs)[0] == (one, other) and trials.num_run == 4


def test_a_first_step_that_times_kernels_has_no_neighbours(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[object] = []

    def run(doses: Sequence[Dose], *, turn: object = None, **_changes: Any) -> TrialResult:
        turns.append(turn)
        return TrialResult(ended="measured")

    assert trials.folder.exists()
    monkeypatch.setattr(trials, "_run", run)
    trials.at_once = 4
    trials.run_pairs([pair_of([], [])])
    assert None not in turns
    turns.clear()
    trials.run_pairs([pair_of([], [Dose(name="cudnn-benchmark", value=True)])])
    trials.times_kernels = True  # the job's own
    trials.run_pairs([pair_of([], [])])
    assert turns == [None] * 4


def test_pairs_that_wait_for_their_turn_leave_none_behind(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(asked: Future[TrialResult], timeout: float | None = None) -> TrialResult:
        while len(trials._started) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    trials.command, trials.at_once = ("train.py", "hangs"), 2
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trials.run_pairs([pair_of([], [])])
    assert not trials._started


def test_a_treatment_that_crashes_is_named(trials: Trials) -> None:
    result = trials.run([Dose(name="magic", value=True)])
    assert "magic" in str(verdict.failure(result))


def test_a_patched_text_runs_in_place_of_the_file(trials: Trials) -> None:
    trials.command = ("train.py", "waits")
    result = trials.run([Dose(name="dropped-calls", value="train.py")])
    assert verdict.failure(result) is None and result.num_steps == PLAN.num_steps
    assert Path("train.py").read_text() == SCRIPT


def test_ranks_are_told_what_torchrun_tells_them() -> None:
    assert launches(1) == [{}]
    first, second = launches(2)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], first["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and int(first["MASTER_PORT"]) > 0


def test_a_patched_script_starts_without_the_tools_that_patch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = SCRIPT.replace("x = torch.randn(16, 8)", "torch.cuda.empty_cache(); x = torch.randn(16, 8)")
    loop = loop.replace(
        "    optimizer.step()\n", "    optimizer.step()\n    assert 'libcst' not in sys.modules\n"
    )
    (tmp_path / "train.py").write_text(loop)
    with Trials(["train.py"], module=False, plan=PLAN) as trials:
        found = trials.run([Dose(name="dropped-calls", value="train.py")])
    assert verdict.failure(found) is None


@pytest.mark.parametrize(
    ("ranks", "doses", "timed", "grows"),
    [
        (1, [Dose(name="threads", value=1)], True, True),
        (1, [], True, False),  # the job's own runs are compared in numbers, too
        (1, [Dose(name="threads", value=1)], False, False),
        (2, [Dose(name="threads", value=1)], True, False),  # each has its own clock, and they must end alike
    ],
)
def test_blocks_grow_where_only_times_of_one_process_count(
    monkeypatch: pytest.MonkeyPatch, ranks: int, doses: list[Dose], timed: bool, grows: bool
) -> None:
    asked: list[TrialOptions] = []

    def run_child(
        _trials: Trials, child: ChildOptions, _own: Path, *, limit_s: float, turn: None
    ) -> TrialResult:
        assert limit_s > 0 and child.trial is not None
        asked.append(child.trial)
        return TrialResult(ended="measured")

    monkeypatch.setattr(Trials, "_run_child", run_child)
    plan = replace(PLAN, seen_steps=300)
    with Trials(["train.py"], module=False, plan=plan, ranks=ranks) as trials:
        trials.run(doses, timed=timed)
    assert [options.most_block_steps for options in asked] == [99 if grows else 0]
    assert (plan.num_steps in asked[0].checked) is not grows


def test_a_timed_trial_lasts_longer_than_the_queue_of_its_workers() -> None:
    plan = TrialPlan(warmup=8, blocks=5, block_steps=2, limit_s=100.0)
    longer = plan.past_queue(16)
    assert (longer.warmup, longer.block_steps) == (32, 16) and longer.limit_s > plan.limit_s
    assert replace(plan, epoch_steps=32).past_queue(16).block_steps == 32  # the pause of an epoch counts
    assert replace(plan, epoch_steps=1000).past_queue(16).block_steps == 16
    assert replace(plan, most_steps=60).past_queue(16) == replace(plan, most_steps=60)  # it ends before
    assert plan.past_queue(0) == plan
