from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatout.measure.arms.switches.ignored_calls import IgnoredCall, NoAnomalies, propose
from flatout.measure.evidence import Place, Site
from flatout.measure.user_code import UserCode

HERE = Place(file="train.py", line=3)


@pytest.fixture(autouse=True)
def anomalies_as_before() -> Iterator[None]:
    yield
    torch.autograd.set_detect_anomaly(False)


def test_anomaly_detection_is_off_and_then_as_it_was_asked_for() -> None:
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    arm = NoAnomalies(suspicion=0.5, place=HERE)
    arm.begin()
    assert not torch._C.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(False):
        assert not torch.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(True):
        assert torch.is_anomaly_enabled() and not torch._C.is_anomaly_enabled()
    arm.end()
    assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()


def test_calls_of_the_user_do_nothing_and_those_of_libraries_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("called"))
    mine = UserCode(str(tmp_path))
    arm = IgnoredCall(mine, "empty_cache", suspicion=0.5, place=HERE)
    arm.begin()
    torch.cuda.empty_cache()
    assert calls == []
    monkeypatch.setattr(mine, "is_user", lambda code: False)
    torch.cuda.empty_cache()
    assert calls == ["called"]
    arm.end()
    torch.cuda.empty_cache()
    assert calls == ["called"] * 2 and arm.refusal is None
    arm.begin()
    arm.end()
    assert arm.refusal == "the script calls empty_cache by a name of its own"


def site(op: str, **changes: Any) -> Site:
    return Site(**{"kind": "call", "op": op, "place": HERE, "via": None, "calls_per_step": 1.0, **changes})


def test_arms_are_proposed_for_what_was_counted(context: Any) -> None:
    sites = (
        site("detect_anomaly"),
        site("empty_cache", host_s=0.05),
        site("synchronize", calls_per_step=0.1),
    )
    found = list(propose(context(sites=sites, device="cuda", attributed_step_s=0.1)))
    assert [(arm.kind, arm.suspicion) for arm in found] == [
        ("no-anomaly-detection", 0.5),
        ("no-empty-cache", 0.5),
    ]
    assert [arm.kind for arm in propose(context(sites=sites))] == ["no-anomaly-detection"]
