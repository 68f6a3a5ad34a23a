"""Planted wrong treatments are rejected, under whatever class they call themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flatout.testing.wrong_treatments import (
    SAFETIES,
    WRONG,
    Install,
    name_of,
    nothing,
    plant,
    wrong_treatments,
)
from flatout.tuner import treatment
from flatout.tuner.numbers import Judgement, Numbers
from flatout.tuner.treatment import Dose, Treatment, all_treatments
from tests.unit.tuner.trial.test_meter import LocalTrials


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Treatment]]:
    """The wrong treatments, beside the real ones."""
    known = {**all_treatments(), **wrong_treatments()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treatment, "all_treatments", lambda: known)
        yield known


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Treatment]) -> Numbers:
    """One judge of all treatments, as in a tuning: what the job itself computes is run once."""
    trials = LocalTrials(tmp_path_factory.mktemp("trials"))
    return Numbers(trials, [trials.run([]) for _ in range(3)])  # type: ignore[arg-type]


def judged(numbers: Numbers, given: dict[str, Treatment], name: str) -> Judgement:
    return numbers.judge(given[name], [], Dose(name=name, value=True))


@pytest.mark.parametrize("install", WRONG, ids=lambda install: install.__name__)
def test_what_is_wrong_is_rejected_in_every_class(
    install: Install, numbers: Numbers, given: dict[str, Treatment]
) -> None:
    assert numbers.reproducible
    for safety in SAFETIES:
        found = judged(numbers, given, name_of(install, safety))
        assert not found.is_right, (safety, found)
        assert found.answer == "wrong numbers" or safety == "lossy", found


def test_what_changes_nothing_passes_in_every_class(numbers: Numbers, given: dict[str, Treatment]) -> None:
    for safety in SAFETIES:
        assert judged(numbers, given, name_of(nothing, safety)).is_right, safety


def test_they_are_known_only_where_they_are_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(all_treatments())
    assert not wrong_treatments().keys() & known.keys()
    monkeypatch.setattr("flatout.testing.wrong_treatments.all_treatments", lambda: known)
    plant()
    assert wrong_treatments().keys() <= known.keys() and len(known) > len(all_treatments())
