"""Right treatments pass, and planted wrong ones do not, under whatever class they call themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.measure.patches import Patches
from flatout.tuner.numbers import Numbers
from flatout.tuner.outermost import Inputs, on_first_call
from flatout.tuner.treatment import Dose, Treatment, Value
from tests.unit.tuner.trial.test_meter import LocalTrials, given, train

__all__ = ["given"]

Install = Callable[[Patches, Value], None]
SAFETIES = ("exact", "reordered", "lossy")


def nothing(_patches: Patches, _value: Value) -> None: ...


def larger_learning_rate(patches: Patches, _value: Value) -> None:
    real = torch.optim.SGD.__init__

    def init(optimizer: Any, params: Any, lr: float, **kwargs: Any) -> None:
        real(optimizer, params, lr=lr * 1.05, **kwargs)

    patches.replace(torch.optim.SGD, "__init__", init)


def no_dropout(patches: Patches, _value: Value) -> None:
    patches.replace(torch.nn.functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x)


def frozen_layer(patches: Patches, _value: Value) -> None:
    on_first_call(patches, lambda model: model[0].requires_grad_(False))


def dropped_micro_batch(patches: Patches, _value: Value) -> None:
    real, calls = torch.autograd.backward, [0]

    def backward(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] % 2:
            real(*args, **kwargs)

    patches.replace(torch.autograd, "backward", backward)


def stale_batch(patches: Patches, _value: Value) -> None:
    real, seen = _BaseDataLoaderIter.__next__, []

    def next_batch(iterator: Any) -> Any:
        seen.append(real(iterator))
        return seen[-2] if len(seen) % 6 == 0 else seen[-1]

    patches.replace(_BaseDataLoaderIter, "__next__", next_batch)


def half_weights(patches: Patches, _value: Value) -> None:
    def halve(inputs: Inputs) -> Inputs:
        return tuple(each.bfloat16() for each in inputs[0]), inputs[1]

    on_first_call(patches, lambda model: model.bfloat16(), change=halve)


def late_loss(patches: Patches, _value: Value) -> None:
    real, before = torch.Tensor.item, [0.0]

    def item(tensor: Any) -> Any:
        before.append(real(tensor))
        return before.pop(0)

    patches.replace(torch.Tensor, "item", item)


WRONG: tuple[Install, ...] = (
    larger_learning_rate, no_dropout, frozen_layer, dropped_micro_batch, stale_batch, half_weights, late_loss,
)  # fmt: skip


def made(install: Install, safety: Any) -> Treatment:
    return Treatment(
        name=install.__name__, safety=safety, summary="", propose=lambda case: [True], install=install
    )


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    trials = LocalTrials(tmp_path)
    return Numbers(trials, [trials.run([]) for _ in range(3)])  # type: ignore[arg-type]


@pytest.mark.parametrize("install", WRONG, ids=lambda install: install.__name__)
def test_what_is_wrong_is_rejected_in_every_class(
    install: Install, numbers: Numbers, given: dict[str, Treatment]
) -> None:
    assert numbers.reproducible
    dose = Dose(name=install.__name__, value=True)
    for safety in SAFETIES:
        given[dose.name] = made(install, safety)
        judged = numbers.judge(given[dose.name], [], dose)
        assert not judged.is_right, (safety, judged)
        assert judged.answer == "wrong numbers" or safety == "lossy", judged


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


def test_a_crash_fails_and_is_not_taken_for_wrong_numbers(
    numbers: Numbers, given: dict[str, Treatment]
) -> None:
    def crash(_patches: Patches, _value: Value) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    given["crash"] = made(crash, "exact")
    judged = numbers.judge(given["crash"], [], Dose(name="crash", value=True))
    assert judged.answer == "failed" and "out of memory" in judged.reason


def test_the_envelope_is_what_a_last_bit_does(numbers: Numbers) -> None:
    assert 0 < numbers.envelope < 1e-3
