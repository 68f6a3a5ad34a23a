from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.measure.arms.switches import uncompiled
from flatout.measure.arms.switches.uncompiled import Uncompiled, propose


def test_compiled_functions_run_as_they_were_written() -> None:
    seen = []

    def backend(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append("compiled")
            return graph(*args)

        return run

    double = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.ones(2)
    double(x)
    arm = Uncompiled()
    arm.begin()
    assert torch.equal(double(x), 2 * x)
    assert seen == ["compiled"]
    arm.end()
    double(x)
    assert seen == ["compiled"] * 2
    torch._dynamo.reset()


def test_it_is_proposed_where_anything_was_compiled(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (True, False):
        monkeypatch.setattr(uncompiled, "has_compiled", lambda compiled=compiled: compiled)
        assert len(list(propose(context()))) == compiled
