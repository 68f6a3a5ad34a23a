"""Right treatments pass, and what cannot be verified does not."""

from __future__ import annotations

import argparse
import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.measure.patches import Patches
from flatout.testing.wrong_treatments import SAFETIES, Install, nothing
from flatout.tuner.numbers import Numbers
from flatout.tuner.treatment import Dose, Treatment, Value
from flatout.tuner.trial.meter import TrialResult
from flatout.tuner.trials import TrialPlan
from tests.unit.tuner.trial.test_meter import LocalTrials, given, train

__all__ = ["given"]


def made(install: Install, safety: Any) -> Treatment:
    return Treatment(
        name=install.__name__, safety=safety, summary="", propose=lambda case: [True], install=install
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[TrialResult]:
    """The job against itself."""
    trials = LocalTrials(tmp_path_factory.mktemp("runs"))
    return [trials.run([]) for _ in range(3)]


@pytest.fixture
def numbers(tmp_path: Path, runs: list[TrialResult]) -> Numbers:
    return Numbers(LocalTrials(tmp_path), runs)  # type: ignore[arg-type]


def test_what_is_right_passes_in_every_class(numbers: Numbers, given: dict[str, Treatment]) -> None:
    dose = Dose(name="nothing", value=True)
    for safety in SAFETIES:
        given[dose.name] = made(nothing, safety)
        assert numbers.judge(given[dose.name], [], dose).is_right, safety
    fused = Dose(name="fused-optimizer", value=True)
    judged = numbers.judge(given[fused.name], [], fused)
    assert judged.is_right and "64 bits" in judged.reason
    # on top of what only rounds, an exact one is compared with that
    given[dose.name] = made(nothing, "exact")
    on_top = numbers.judge(given[dose.name], [fused], dose)
    assert on_top.is_right and "bit for bit" in on_top.reason


def test_a_job_without_a_seed_is_verified_and_one_that_draws_otherwise_is_not(
    tmp_path: Path, given: dict[str, Treatment]
) -> None:
    number = 0

    def unlike() -> None:
        nonlocal number
        number += 1
        shift = number

        def seeded(seed: int) -> None:
            torch.random.manual_seed(seed + shift)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "manual_seed", seeded)
            train()

    for job, is_right in ((train, True), (unlike, False)):
        trials = LocalTrials(tmp_path, job)
        found = Numbers(trials, [trials.run([]) for _ in range(3)])  # type: ignore[arg-type]
        dose = Dose(name="nothing", value=True)
        assert found.reproducible is is_right
        for safety in ("exact", "reordered"):
            given[dose.name] = made(nothing, safety)
            assert found.judge(given[dose.name], [], dose).is_right is is_right, (safety, is_right)


def test_a_job_that_reads_other_numbers_in_each_run_is_told_to_seed_what_it_draws(
    tmp_path: Path, given: dict[str, Treatment]
) -> None:
    """Seen on games of an environment without a seed: each episode has another length."""
    number = 0

    def plays() -> None:
        nonlocal number
        number += 1
        with pytest.MonkeyPatch.context() as patch:
            entropy = nn.functional.cross_entropy

            def acts(*args: Any) -> torch.Tensor:
                for _ in range(number):
                    torch.ones(()).item()
                return entropy(*args)

            patch.setattr(nn.functional, "cross_entropy", acts)
            train()

    trials = LocalTrials(tmp_path, plays)
    found = Numbers(trials, [trials.run([]) for _ in range(3)])  # type: ignore[arg-type]
    given["nothing"] = made(nothing, "exact")
    judged = found.judge(given["nothing"], [], Dose(name="nothing", value=True))
    assert not judged.is_right and "seed what it draws" in judged.reason


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples with noise, from everybody's generator or from one that each worker has a copy of."""

    def __init__(self, own: np.random.RandomState | None) -> None:
        self.own = own

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = np.random.rand() if self.own is None else self.own.rand()
        return torch.full((4,), index / 64) + float(drawn), index % 2


@pytest.mark.parametrize("has_own", [False, True])
def test_workers_may_draw_other_random_numbers_and_change_nothing_else(
    tmp_path: Path, given: dict[str, Treatment], has_own: bool
) -> None:
    def job() -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = Augmented(np.random.RandomState(0) if has_own else None)
        for _ in range(10):
            for x, y in DataLoader(data, batch_size=8, shuffle=True):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    trials = LocalTrials(tmp_path, job, TrialPlan(warmup=2, blocks=1, block_steps=2))
    numbers = Numbers(trials, [trials.run([]) for _ in range(2)])  # type: ignore[arg-type]
    dose, plain = Dose(name="loader-workers", value=2), numbers.plain
    judged = numbers.judge(given[dose.name], [], dose)
    if has_own:  # both workers draw the same
        assert judged.reason == "batch 2 of loader 1 differs"
        assert trials.always == {} and numbers.plain is plain
    else:
        assert judged.is_right and judged.reason.startswith("with the random numbers of each sample fixed")
        assert "bit for bit" in judged.reason and trials.always == {"fixed_samples": True}


def test_other_dropout_masks_hide_nothing_and_are_left_out_if_seeds_do_not_decide(
    numbers: Numbers, given: dict[str, Treatment]
) -> None:
    own = torch.Generator().manual_seed(1)

    def other_masks(patches: Patches, value: Value) -> None:
        def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return x * (torch.rand(x.shape, generator=own) >= p) / (1 - p) * (1 if value is True else 0.9)

        patches.replace(nn.functional, "dropout", dropout)

    given["other-masks"] = made(other_masks, "lossy")
    judged = numbers.judge(given["other-masks"], [], Dose(name="other-masks", value=True))
    assert judged.is_right and judged.reason.startswith("without dropout, late losses change by +0.00%")
    judged = numbers.judge(given["other-masks"], [], Dose(name="other-masks", value=2))
    assert judged.answer == "wrong numbers"


@pytest.mark.parametrize(("probability", "is_right"), [(0.2, True), (0.1, False)])
def test_fewer_dropped_values_are_no_other_masks(
    tmp_path: Path, given: dict[str, Treatment], probability: float, is_right: bool
) -> None:
    own, real = torch.Generator().manual_seed(1), nn.functional.dropout

    def drops(patches: Patches, _value: Value) -> None:
        def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            as_it_is = real(x, p, training, inplace)  # shuffling draws from the same generator
            if p == 0.0:
                return as_it_is
            return x * (torch.rand(x.shape, generator=own) >= probability) / (1 - probability)

        patches.replace(nn.functional, "dropout", dropout)

    given["drops"] = made(drops, "lossy")
    job = functools.partial(train, lr=0.05)
    trials = LocalTrials(tmp_path, job, TrialPlan(warmup=20, blocks=2, block_steps=20))
    numbers = Numbers(trials, [trials.run([]) for _ in range(2)])  # type: ignore[arg-type]
    judged = numbers.judge(given["drops"], [], Dose(name="drops", value=True))
    assert judged.is_right is is_right, judged
    assert judged.reason.startswith("without dropout" if is_right else "dropout moves"), judged


def test_a_change_that_is_no_chance_is_not_put_down_to_masks(
    numbers: Numbers, given: dict[str, Treatment]
) -> None:
    """Its interval reaches into the margin, but not to zero: more seeds decide, with dropout."""
    judged: list[Any] = []

    def seeds(_kept: object, _doses: object, **changes: Any) -> Any:
        judged.append(changes)
        for seed, change in enumerate((1.003, 1.0025, 1.0012, 1.003, 1.003, 1.003, 1.003, 1.003)):
            plain = replace(numbers.plain, losses=tuple(each + seed / 1000 for each in numbers.plain.losses))
            yield plain, replace(plain, losses=tuple(each * change for each in plain.losses), reads=())

    given["nothing"] = made(nothing, "lossy")
    numbers._paired_seeds = seeds  # type: ignore[assignment,method-assign]
    numbers.plain = replace(numbers.plain, reads=())
    found = numbers.judge(given["nothing"], [], Dose(name="nothing", value=True))
    assert found.answer == "wrong numbers" and "late losses change" in found.reason, found
    assert judged == [{}]


def test_code_that_draws_as_eager_code_does_is_compiled_only_for_a_job_that_draws(numbers: Numbers) -> None:
    compiled = [Dose(name="compile", value="default")]
    assert numbers.plain.draws and numbers.changes_for(compiled) == {"same_random": True}
    numbers.plain = replace(numbers.plain, draws=False)
    assert numbers.changes_for(compiled) == {"same_random": False}


def test_what_a_comparison_needs_runs_beside_each_other_with_the_same_answers(
    tmp_path: Path, given: dict[str, Treatment]
) -> None:
    trials = LocalTrials(tmp_path)
    numbers = Numbers(trials, [trials.run([]) for _ in range(2)])  # type: ignore[arg-type]
    trials.at_once, rounds, real = 8, list[int](), trials.run_all
    trials.run_all = lambda runs: (rounds.append(len(runs)), real(runs))[1]  # type: ignore[method-assign]
    fused, nothing_ = Dose(name="fused-optimizer", value=True), Dose(name="nothing", value=True)
    assert numbers.judge(given[fused.name], [], fused).is_right
    assert rounds == [4]  # itself, and three first steps, one of them in 64 bits
    given["nothing"] = made(nothing, "lossy")
    assert numbers.judge(given["nothing"], [], nothing_).is_right
    assert rounds == [4, 8]  # two first steps, and two runs with each of three seeds
    assert numbers.judge(given[fused.name], [nothing_], fused).is_right
    assert rounds == [4, 8, 7]  # the job under what is lossy again, twice and with its last bit changed, too
    trials.at_once = 2  # no room for twice the memory beside another
    assert numbers.judge(given[fused.name], [], fused).is_right
    assert rounds[3:] == [6, 1]

    def larger_steps(patches: Patches, _value: Value) -> None:
        real_step = torch.optim.SGD.step
        patches.replace(
            torch.optim.SGD,
            "step",
            lambda each: (each.param_groups[0].update(lr=1.05 * each.defaults["lr"]), real_step(each))[1],
        )

    for safety in SAFETIES:
        given["larger"] = made(larger_steps, safety)
        judged = numbers.judge(given["larger"], [], Dose(name="larger", value=True))
        assert judged.answer == "wrong numbers", (safety, judged)


def test_a_first_step_that_was_ended_is_no_verdict_on_its_numbers(
    numbers: Numbers, given: dict[str, Treatment]
) -> None:
    real = numbers.trials.run_all

    def run_all(runs: Any) -> Any:
        ended = TrialResult(ended="killed", error="did not end within 9 s")
        return [ended if changes.get("double") else real([(doses, changes)])[0] for doses, changes in runs]

    numbers.trials.run_all = run_all  # type: ignore[method-assign]
    fused = Dose(name="fused-optimizer", value=True)
    judged = numbers.judge(given[fused.name], [], fused)
    assert judged.answer == "failed" and judged.reason == "the script did not end within 9 s"


def test_a_crash_fails_and_is_not_taken_for_wrong_numbers(
    numbers: Numbers, given: dict[str, Treatment]
) -> None:
    def crash(_patches: Patches, _value: Value) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    given["crash"] = made(crash, "exact")
    judged = numbers.judge(given["crash"], [], Dose(name="crash", value=True))
    assert judged.answer == "failed" and "out of memory" in judged.reason


def average_while_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(20):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)


def test_an_average_that_no_loss_shows_is_compared_too(tmp_path: Path, given: dict[str, Treatment]) -> None:
    def one_by_one(patches: Patches, value: Value) -> None:
        def lerp(average: list[torch.Tensor], model: list[torch.Tensor], weight: float) -> None:
            for kept, parameter in zip(average, model, strict=True):
                kept.mul_(1 - weight).add_(parameter, alpha=weight * float(value))

        patches.replace(torch, "_foreach_lerp_", lerp)

    trials = LocalTrials(tmp_path, average_while_training)
    numbers = Numbers(trials, [trials.run([]) for _ in range(2)])  # type: ignore[arg-type]
    given["one_by_one"] = made(one_by_one, "reordered")
    assert numbers.judge(given["one_by_one"], [], Dose(name="one_by_one", value=1)).is_right
    for value, safety in (("1.001", "reordered"), ("1.001", "exact"), (1, "exact")):
        given["one_by_one"] = made(one_by_one, safety)
        judged = numbers.judge(given["one_by_one"], [], Dose(name="one_by_one", value=value))
        assert judged.answer == "wrong numbers" and "such as an average" in judged.reason, value


def test_the_envelope_is_what_a_last_bit_does(numbers: Numbers) -> None:
    assert 0 < numbers.envelope < 1e-3


@pytest.mark.parametrize(
    ("divides", "normalises", "is_right"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_larger_micro_batches_must_leave_each_step_as_it_is(
    tmp_path: Path, given: dict[str, Treatment], divides: bool, normalises: bool, is_right: bool
) -> None:
    def job() -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=8)
        parser.add_argument("--accumulate", type=int, default=2)
        options = parser.parse_args([])
        torch.manual_seed(0)
        x = torch.randn(512, 8)
        y = (x.sum(1) > 0).long()
        norm = nn.BatchNorm1d(16) if normalises else nn.Dropout(0.2)
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for _ in range(10):
            loader = DataLoader(TensorDataset(x, y), batch_size=options.batch_size, shuffle=True)
            for number, (a, b) in enumerate(loader, 1):
                loss = nn.functional.cross_entropy(model(a), b)
                (loss / options.accumulate if divides else loss).backward()
                if number % options.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    trials = LocalTrials(tmp_path, job)
    numbers = Numbers(trials, [trials.run([]) for _ in range(2)])  # type: ignore[arg-type]
    dose = Dose(name="larger-micro-batches", value="8x2=16x1")
    judged = numbers.judge(given[dose.name], [], dose)
    assert judged.is_right is is_right, judged
    if is_right:
        assert judged.reason.startswith("without dropout, gradients are as close to 64 bits")
        other = Dose(name="nothing", value=True)  # on top of it
        given[other.name] = made(nothing, "exact")
        assert "bit for bit" in numbers.judge(given[other.name], [dose], other).reason
