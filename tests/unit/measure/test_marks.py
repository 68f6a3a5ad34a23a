from __future__ import annotations

from collections.abc import Iterator

import pytest

import flatout
from flatout.measure import marks


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    yield
    marks.listen(None)


def test_a_step_outside_a_diagnosis_does_nothing() -> None:
    assert marks.step() is None  # type: ignore[func-returns-value]


def test_a_listener_hears_every_step_until_it_leaves() -> None:
    heard: list[str] = []
    marks.listen(lambda: heard.append("step"))
    marks.step()
    flatout.step()
    marks.listen(None)
    marks.step()
    assert heard == ["step", "step"]
