from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.measure.arms import threads
from flatout.measure.arms.threads import propose


@pytest.fixture(autouse=True)
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_more_threads_than_cores_are_tried_with_fewer(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "read_cores", lambda: 2.0)
    made = context()
    one, two = propose(made)
    assert (one.label, two.value) == ("threads=1", 2.0)
    one.begin()
    assert torch.get_num_threads() == 1
    assert made.process.threads.evidence().num == 3
    one.end()
    assert torch.get_num_threads() == 3 and made.process.threads.held is None


@pytest.mark.parametrize(("device", "cores"), [("cuda", 2.0), ("cpu", 3.0), ("cpu", None)])
def test_what_is_left_alone(
    context: Any, monkeypatch: pytest.MonkeyPatch, device: str, cores: float | None
) -> None:
    monkeypatch.setattr(threads, "read_cores", lambda: cores)
    assert list(propose(context(device=device))) == []
