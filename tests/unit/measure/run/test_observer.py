"""A whole diagnosis of a tiny loop in this process, and what an observer must never do to a job."""

from __future__ import annotations

import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.measure import PHASES, clock
from flatout.measure.arms.arm import UNWATCHED, Arm, ArmContext
from flatout.measure.arms.unwatched import Unwatched
from flatout.measure.evidence import INSTRUMENTS, Evidence, Site
from flatout.measure.run import observer as observer_module
from flatout.measure.run.assemble import Assembly, Ending
from flatout.measure.run.lineage import LEAST_SET_UP_S, OVERDUE_S
from flatout.measure.run.observer import FEWEST_FOR_ARMS, JobListener, Observer, ObserverOptions
from flatout.measure.run.step_blocks import deadline, sequence
from flatout.measure.run.step_blocks.deadline import LEAST_STEPS_S
from flatout.measure.run.step_blocks.schedule import StepBlock
from tests.support.measure import line_of

HERE = Path(__file__)
ROWS, WIDTH = 8, 6


def line(marker: str) -> int:
    return line_of(HERE, marker)


class Slow(Dataset[Any]):
    """A dataset whose samples take longer than the rest of the step."""

    def __len__(self) -> int:
        return ROWS * 30

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + 4e-4
        while time.perf_counter() < end:
            pass
        return torch.full((WIDTH,), float(index % 7))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for i in range(len(x)):
            kind = torch.tensor(i % 7)  # at: create
            rows.append(self.out(x)[i] + self.embed(kind).sum())  # at: row
        return torch.stack(rows)


def train(observer: Observer, finished: Callable[[], bool]) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), batch_size=ROWS)  # at: loader
    while not finished():
        for x in loader:
            loss = model(x).pow(2).mean()  # at: call
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # at: item
            if finished():
                break


class Told(JobListener):
    """Keeps what an observer says."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.due_in_s: list[float] = []

    def progress(self, message: str) -> None:
        self.messages.append(message)

    def due(self, seconds: float) -> None:
        self.due_in_s.append(seconds)


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def evidence(told: Told) -> Evidence:
    """One diagnosis that the tests of its parts share."""
    observer = Observer(ObserverOptions(folder=str(HERE.parent)), told)
    observer.install()
    try:
        train(observer, lambda: observer.finished)
    finally:
        observer.remove()
    return Assembly(command=("train.py",), folder=str(HERE.parent)).evidence(observer, Ending("measured", 0))


def test_nothing_is_missing(evidence: Evidence) -> None:
    assert evidence.missing == ()
    assert (evidence.job.ended, evidence.job.anchor, evidence.job.device) == ("measured", "SGD.step", "cpu")
    assert evidence.job.warmup_reason


def test_every_arm_has_its_steps_and_each_block_one_arm(evidence: Evidence, told: Told) -> None:
    arms = {step.arm for step in evidence.steps}
    assert arms >= {"warmup", "real", "cached", "half", *INSTRUMENTS}
    planned = [step for step in evidence.steps if step.arm != "warmup"]
    by_block: dict[int, set[str]] = {}
    for step in planned:
        by_block.setdefault(step.block, set()).add(step.arm)
    assert all(len(arms) == 1 for arms in by_block.values())
    assert len(told.messages) == len(by_block)
    assert [step.index for step in evidence.steps] == sorted(step.index for step in evidence.steps)


def test_the_first_step_of_a_block_is_never_kept(evidence: Evidence) -> None:
    planned = [step for step in evidence.steps if step.arm != "warmup"]
    firsts = [step for step, before in zip(planned[1:], planned, strict=False) if step.block != before.block]
    assert firsts
    assert not any(step.kept for step in firsts)


def test_the_phases_of_a_step_sum_to_the_step(evidence: Evidence) -> None:
    for step in evidence.steps:
        assert set(step.phases_s) == set(PHASES)
        assert sum(step.phases_s.values()) == pytest.approx(step.step_s, rel=1e-4)
    for phase in ("wait", "forward", "backward", "optimizer", "rest"):
        assert (evidence.phase_s(phase) or 0) > 0
    assert evidence.phase_s("transfer") == 0


def test_steps_know_their_rows_and_what_they_are_made_of(evidence: Evidence) -> None:
    assert {step.rows for step in evidence.kept("real")} == {ROWS}
    assert {step.rows for step in evidence.kept("half")} == {ROWS // 2}
    for step in evidence.kept("real"):
        assert (step.num_batches, step.num_forwards, step.num_backwards) == (1, 1, 1)


def test_a_loader_that_is_gone_is_a_measured_speedup(evidence: Evidence) -> None:
    cached, half = evidence.counterfactual("cached"), evidence.counterfactual("half")
    assert cached is not None and half is not None
    assert cached.speedup_low > 1
    assert (cached.baseline, half.baseline) == ("real", "cached")
    assert cached.num_blocks >= 3
    waits_s = {
        arm: statistics.median(step.phases_s["wait"] for step in evidence.kept(arm))
        for arm in ("real", "cached")
    }
    assert waits_s["cached"] < waits_s["real"] / 2


def site(evidence: Evidence, kind: str, op: str) -> Site:
    (found,) = [each for each in evidence.sites if (each.kind, each.op) == (kind, op)]
    return found


def test_the_guilty_lines_are_counted_exactly(evidence: Evidence) -> None:
    create, row, item = (
        site(evidence, "create", "tensor"),
        site(evidence, "row", "__getitem__"),
        site(evidence, "sync", "item"),
    )
    assert (create.place.line, create.calls_per_step, create.via) == (line("create"), ROWS, None)
    assert (row.place.line, row.calls_per_step, row.requires_grad) == (line("row"), ROWS, True)
    assert (item.place.line, item.calls_per_step) == (line("item"), 1)
    assert row.host_s is not None and row.host_s > 0
    assert row.backward_s is not None and row.backward_s > 0
    assert evidence.attributed_step_s is not None
    assert row.host_s + row.backward_s < evidence.attributed_step_s


def test_the_loader_is_described(evidence: Evidence) -> None:
    (loader,) = evidence.loaders
    assert loader.trains
    assert loader.place is not None and loader.place.line == line("loader")
    assert (loader.dataset, loader.batch_size, loader.num_workers) == ("Slow", ROWS, 0)
    assert loader.fetch_s is not None and loader.wait_s is not None
    assert loader.fetch_s.median_s <= loader.wait_s.median_s


def test_the_model_call_is_described(evidence: Evidence) -> None:
    (call,) = evidence.module_calls
    assert (call.module, call.place.line, call.calls_per_step, call.rows) == ("Model", line("call"), 1, ROWS)


def test_operators_and_memory_are_described(evidence: Evidence) -> None:
    assert evidence.kernels is not None and evidence.memory is not None and evidence.precision is not None
    assert evidence.kernels.num_kernels > 10
    assert evidence.memory.peak_bytes is not None and evidence.memory.peak_bytes > 0
    assert evidence.precision.parameter_dtypes == ("float32",)


def test_the_source_around_each_place_travels_with_it(evidence: Evidence) -> None:
    text = evidence.sources[HERE.name]
    assert "# at: create" in text[str(line("create"))]
    assert "# at: loader" in text[str(line("loader"))]


# -- what an observer must never do


def test_however_long_the_imports_took_the_steps_get_some_time() -> None:
    began_s = time.monotonic() - 1000.0
    options = ObserverOptions(folder=str(HERE.parent), seconds=60.0, began_s=began_s)
    late = Observer(options)
    late.install()
    assert late.due_s == began_s + LEAST_SET_UP_S + OVERDUE_S
    optimizer = sgd()
    try:
        steps(optimizer, 1)
        first_s = late.deadline.first_step_s
        assert first_s is not None
        assert late.deadline.ends_s == first_s + LEAST_STEPS_S
        steps(optimizer, 3)
    finally:
        late.remove()
    assert late.deadline.first_step_s == first_s
    assert late.due_s >= late.deadline.ends_s + OVERDUE_S


def test_when_the_job_will_be_overdue_is_announced_where_it_changes() -> None:
    told = Told()
    options = ObserverOptions(folder=str(HERE.parent), seconds=60.0)
    observer = Observer(options, told)
    observer.install()
    try:
        observer._look_at_time()
        observer._look_at_time()
        steps(sgd(), 3)
        observer._look_at_time()
    finally:
        observer.remove()
    set_up_s, after_it_s = told.due_in_s
    assert LEAST_SET_UP_S < set_up_s <= LEAST_SET_UP_S + OVERDUE_S
    assert after_it_s <= 60.0 + OVERDUE_S


def test_ranks_are_never_overdue(observer: Observer) -> None:
    observer.agreement.agreed = (0, [])
    assert observer.due_s == math.inf and not observer.is_overdue


@pytest.fixture
def observer() -> Iterator[Observer]:
    made = Observer(ObserverOptions(folder=str(HERE.parent)))
    made.install()
    yield made
    made.remove()


def steps(optimizer: torch.optim.Optimizer, num: int) -> None:
    for _ in range(num):
        optimizer.step()


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_an_observer_that_is_removed_in_the_middle_leaves_nothing_on(observer: Observer) -> None:
    optimizer = sgd()
    while observer.arm != "count":
        optimizer.step()
    assert len(_get_current_function_mode_stack()) == 1
    observer.remove()
    assert _get_current_function_mode_stack() == []
    num = len(observer.rows)
    steps(optimizer, 3)
    flatout.step()
    assert len(observer.rows) == num
    assert not observer.finished


def test_a_function_the_script_took_under_observation_is_harmless_afterwards(observer: Observer) -> None:
    from torch.autograd import backward

    observer.remove()
    x = nn.Parameter(torch.ones(2))
    for _ in range(9):
        backward([x.sum()])
    assert observer.rows == []


def test_explicit_marks_beat_optimizers(observer: Observer) -> None:
    optimizer = sgd()
    for _ in range(4):
        steps(optimizer, 2)
        flatout.step()
    assert observer.anchor.name == "flatout.step"
    assert len(observer.rows) == 3


def test_a_second_optimizer_makes_the_rarer_one_the_step(observer: Observer) -> None:
    often, rarely = sgd(), sgd()
    for _ in range(4):
        steps(often, 2)
        steps(rarely, 1)
    assert len(observer.rows) == 3
    assert observer.anchor.current is not None and observer.anchor.current[1] == id(rarely)


def test_inference_without_an_optimizer_is_stepped_by_model_calls(observer: Observer) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for _ in range(9):
            model(torch.ones(3, 2))
    assert observer.anchor.name == "Linear call"
    assert observer.rows


def test_training_after_an_evaluation_starts_the_measurement_again(observer: Observer) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        while observer.warm_up is not None:
            model(torch.ones(3, 2))
    optimizer = sgd()
    steps(optimizer, 3)
    assert observer.anchor.name == "SGD.step"
    assert {row.arm for row in observer.rows} == {"warmup"}


@pytest.mark.parametrize("has_gradients", [True, False])
def test_model_calls_with_gradients_may_be_games_before_the_first_backward(
    observer: Observer, has_gradients: bool
) -> None:
    """Training without a torch optimizer: its first update comes after thousands of calls."""
    model = nn.Linear(2, 2)
    observer.deadline_s = time.monotonic() + (3.0 if has_gradients else 60.0)
    with torch.set_grad_enabled(has_gradients):
        while not observer.finished:
            model(torch.ones(3, 2))
    assert observer.out_of_time is has_gradients


def test_the_first_backward_after_games_starts_the_measurement_again(observer: Observer) -> None:
    model = nn.Linear(2, 2)
    while observer.warm_up is not None:
        model(torch.ones(3, 2))
    for _ in range(6):
        model(torch.ones(3, 2)).sum().backward()
    assert observer.anchor.name == "backward"
    assert {row.arm for row in observer.rows} == {"warmup"}


def test_one_step_of_an_optimizer_that_holds_all_of_training_is_stepped_by_its_closure(
    observer: Observer,
) -> None:
    weight = nn.Parameter(torch.linspace(-2, 2, 40))
    optimizer = torch.optim.LBFGS([weight], max_iter=60, tolerance_grad=0, tolerance_change=0, lr=1e-3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum() + weight.cos().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    assert observer.anchor.name == "backward"
    num_steps = len(observer.rows)
    assert num_steps > 40
    for _ in range(3):  # the next one shows that it is a step of many
        optimizer.step(closure)
    assert observer.anchor.name == "LBFGS.step"
    assert 0 < len(observer.rows) <= 3


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    """The time is up, and a step that takes a millisecond is overdue."""
    monkeypatch.setattr(deadline, "OVERDUE_S", 1e-3)
    monkeypatch.setattr(deadline, "OVERDUE", 0)
    observer = Observer(ObserverOptions(folder=str(HERE.parent), seconds=0.0))
    observer.install()
    yield observer
    observer.remove()


def evaluate(observer: Observer) -> None:
    seen = len(observer.stack_watch.looks)
    while len(observer.stack_watch.looks) < seen + 5 or not observer.is_overdue:
        sum(range(1000))  # at: evaluates


def test_a_step_that_goes_on_after_the_time_is_cut_short_and_its_line_named(late: Observer) -> None:
    steps(sgd(), 1)
    evaluate(late)  # at: calls
    late.cut_short()
    assert late.finished and late.rows == []
    (reason,) = (each for each in late.tools.missing if each.startswith("the step under way"))
    assert f"{HERE.name}:{line('evaluates')}" in reason
    seconds = int(reason.rpartition("need at most --seconds ")[2])
    assert seconds == math.ceil(FEWEST_FOR_ARMS * late.deadline.set_up_s)
    assert not late.is_overdue


def test_a_step_that_was_cut_short_is_noted_and_not_timed(late: Observer) -> None:
    steps(sgd(), 3)
    evaluate(late)
    late.cut_short()
    assert [row.transition for row in late.rows[1:]] == [False, True]
    assert late.rows[-1].host_s > late.rows[0].host_s
    assert len({row.index for row in late.rows}) == 3


def test_nothing_is_overdue_before_a_step_ended_or_while_time_is_left(late: Observer) -> None:
    evaluating = threading.Event()
    evaluating.wait(2e-3)
    assert not late.is_overdue
    steps(sgd(), 1)
    late.deadline.ends_s += 100
    evaluating.wait(2e-3)
    assert not late.is_overdue


def test_without_counterfactuals_the_training_stays_as_written() -> None:
    observer = Observer(ObserverOptions(folder=str(HERE.parent), counterfactuals=False))
    observer.install()
    try:
        train(observer, lambda: bool(observer.sequence.blocks))
    finally:
        observer.remove()
    assert not {"cached", "half"} & {block.arm for block in observer.sequence.blocks}
    assert any("left out" in message for message in observer.tools.missing)


def test_a_loop_without_a_loader_is_served_no_batches(observer: Observer) -> None:
    optimizer = sgd()
    while not observer.finished:
        optimizer.step()
    assert not {"cached", "half"} & {block.arm for block in observer.sequence.blocks}
    reasons = {arm.label: arm.reason for arm in observer.sequence.arms_not_run(())}
    assert "no DataLoader is trained on" in reasons["cached"]


def test_steps_that_fell_back_to_real_batches_are_never_kept() -> None:
    """Three rows cannot be halved: no step may pass for one on half a batch."""
    observer = Observer(ObserverOptions(folder=str(HERE.parent)))
    observer.install()
    data = DataLoader(torch.ones(90, 2), batch_size=3)  # type: ignore[arg-type]
    optimizer = sgd()
    try:
        while not observer.finished:
            for _x in data:
                optimizer.step()
    finally:
        observer.remove()
    evidence = Assembly(command=("x",), folder=".").evidence(observer, Ending("measured", 0))
    assert any(step.arm == "half" for step in evidence.steps)
    assert evidence.kept("half") == ()
    assert evidence.counterfactual("half") is None
    assert evidence.counterfactual("cached") is not None
    assert {arm.label: arm.reason for arm in evidence.arms_not_run} == {
        "half": "batches of 3 are too small for it"
    }


def diagnosed(step: Callable[[], None], **options: Any) -> Evidence:
    observer = Observer(ObserverOptions(folder=str(HERE.parent), **options))
    observer.install()
    try:
        while not observer.finished:
            step()
    finally:
        observer.remove()
    return Assembly(command=("x",), folder=".").evidence(observer, Ending("measured", 0))


def test_when_the_time_is_up_the_fewest_steps_are_measured_and_the_report_says_so() -> None:
    optimizer = sgd()
    evidence = diagnosed(lambda: optimizer.step(), seconds=0.0)  # noqa: PLW0108 - looked up when it is called
    assert [step.arm for step in evidence.steps] == ["warmup"] * 2 + ["real"] * 4
    assert "the time was up after 2 steps" in (evidence.job.warmup_reason or "")
    assert any("the time was up (--seconds)" in message for message in evidence.missing)
    assert {f"{name}: no time was left for this pass" for name in INSTRUMENTS} <= set(evidence.missing)


def test_steps_under_which_nothing_is_changed_are_measured_when_asked_for() -> None:
    class Fails(Arm):
        kind, label, suspicion = "knock-out", "knock-out x.py:1", 1.0

        def begin(self) -> None:
            raise ValueError("no such block")

    def work() -> None:
        optimizer.step()
        time.sleep(0.002)

    optimizer = sgd()
    evidence = diagnosed(work, same=True, proposers=(lambda context: [Fails()],))
    (same,) = evidence.counterfactuals
    assert (same.kind, same.baseline) == ("same", "real") and same.num_blocks >= 3
    assert same.speedup_low < 1.3 and same.speedup_high > 0.77
    (fails,) = evidence.arms_not_run
    assert fails.reason == "it could not start: ValueError: no such block"


def test_steps_without_notes_are_counted_and_timed_and_are_in_no_report() -> None:
    def work() -> None:
        model(torch.ones(3, 2))
        optimizer.step()
        sum(range(5000))
        num_done.append(1)

    optimizer, model, num_done = sgd(), nn.Linear(2, 2), list[int]()
    propose = (lambda context: [Unwatched(suspicion=1.0)],)
    evidence = diagnosed(work, proposers=propose)
    assert not evidence.counterfactuals and not evidence.arms_not_run
    assert [step.index for step in evidence.steps] == list(range(2, len(num_done) + 1))
    steps = [step for step in evidence.steps if step.arm == UNWATCHED]
    assert len(steps) > Unwatched.fewest_rounds
    assert {(step.num_forwards, step.num_batches) for step in steps} == {(1, 0)}
    assert all(0 < step.phases_s["forward"] < step.step_s for step in steps)
    assert all(step.step_s == pytest.approx(sum(step.phases_s.values()), rel=1e-3) for step in steps)


def test_no_arm_begins_before_the_step_at_which_an_earlier_run_failed() -> None:
    optimizer = sgd()
    evidence = diagnosed(optimizer_step(optimizer), same=True, proposers=(), plain_steps=300)
    first = min(step.index for step in evidence.steps if step.arm == "same")
    assert first >= 300
    assert {step.arm for step in evidence.steps if step.index in range(290, 300)} == {"real"}


def optimizer_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lambda: optimizer.step()  # noqa: PLW0108 - looked up when it is called


def test_a_forked_process_is_not_observed(observer: Observer) -> None:
    """It would take part in the measurement, end it, and write over its evidence."""
    optimizer = sgd()
    steps(optimizer, 2)
    num = len(observer.rows)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        steps(optimizer, 5)
        os.write(writer, str(len(observer.rows) - num).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 9) == b"0"
    steps(optimizer, 1)
    assert len(observer.rows) == num + 1


def test_a_count_that_meets_a_game_is_repeated(observer: Observer) -> None:
    """Every fifth step plays first: 20 calls that no step of training makes."""
    optimizer, model = sgd(), nn.Linear(2, 2)
    counted: list[int] = []
    while observer.tools.kernels is None:
        for _ in range(20 if len(counted) % 5 == 0 else 0):
            model(torch.ones(1, 2))  # at: plays
        model(torch.ones(3, 2))
        counted.append(observer.arm == "count")
        steps(optimizer, 1)
    assert sum(counted) > 2 or not any(counted[::5])
    assert observer.tools.modules is not None
    places = [call.place.line for call in observer.tools.modules.evidence()]
    assert places and line("plays") not in places


class SlowClock:
    """Time in which `heavy` takes three seconds, and everything else what this process computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lead_s = 0.0
        monkeypatch.setattr(clock, "now", lambda: time.process_time() + self.lead_s)
        ahead = SimpleNamespace(monotonic=lambda: time.process_time() + self.lead_s)
        for module in (observer_module, deadline):
            monkeypatch.setattr(module, "time", ahead)

    def spend(self, seconds: float) -> None:
        # a thread that looks at the stack may wait for its turn, on a busy machine
        is_looked_at = any(thread.name == "flatout-stacks" for thread in threading.enumerate())
        time.sleep(1.0 if is_looked_at else seconds / 100)
        self.lead_s += seconds


def heavy(rows: torch.Tensor, spend: Callable[[float], None]) -> torch.Tensor:  # at: heavy
    spend(3.0)
    return rows * 2


def test_what_passes_find_that_were_put_off_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByKernels(Arm):
        kind = label = "autocast"

    def propose(context: ArmContext) -> Iterator[Arm]:
        if context.kernels is not None:
            yield ByKernels()

    plan = [StepBlock(arm="real", num_steps=4)], [StepBlock(arm="kernels", num_steps=2)]
    monkeypatch.setattr(sequence, "plan_passes", lambda *_args, **_options: plan)
    optimizer = sgd()
    evidence = diagnosed(lambda: optimizer.step(), proposers=(propose,))  # noqa: PLW0108 - looked up when it is called
    assert list(dict.fromkeys(each.arm for each in evidence.steps)) == [
        "warmup",
        "real",
        "kernels",
        "autocast",
    ]


def test_with_long_steps_the_heaviest_block_is_measured_and_the_passes_take_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.unfreeze()  # this file's own functions are looked for
    slow, model = SlowClock(monkeypatch), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(heavy(torch.ones(4, 2), slow.spend)).sum().backward()
        optimizer.step()

    evidence = diagnosed(step, seconds=54.0)
    arms = list(dict.fromkeys(each.arm for each in evidence.steps))
    assert arms[:4] == ["warmup", "stacks", "count", "real"]
    real = [each for each in evidence.steps if each.arm == "real"]
    assert len({each.block for each in real}) == len(real)  # none is spent on a transition
    assert any(each.kept for each in real)
    without = [
        each
        for each in evidence.counterfactuals
        if each.place is not None and each.place.line <= line("heavy") + 1 <= (each.last_line or 0)
    ]
    assert without and max(each.speedup for each in without) > 20
    ran = {each.arm for each in evidence.steps}
    for name in set(INSTRUMENTS) - ran:
        assert f"{name}: no time was left for this pass" in evidence.missing
