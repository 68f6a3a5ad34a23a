"""Which calls are left out, and which stay."""

from __future__ import annotations

import pytest

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.dropped_calls import PATCH
from tests.unit.tuner.patches.test_patch import rewrite

TEXT = """
torch.autograd.set_detect_anomaly(True)
torch.cuda.empty_cache()
for batch in loader:
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    if slow:
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
"""


def test_debugging_is_left_out_of_loops() -> None:
    new = rewrite(PATCH, TEXT)
    assert new == (
        "\ntorch.cuda.empty_cache()\nfor batch in loader:\n    optimizer.zero_grad()\n    loss.backward()\n"
        "    if slow:\n        pass\n"
    )
    assert rewrite(PATCH, TEXT, 9) == TEXT.replace("    torch.cuda.synchronize()\n", "")


def test_a_wait_that_a_clock_needs_stays() -> None:
    text = "for x in y:\n    a = time.perf_counter()\n    torch.cuda.synchronize()\n"
    with pytest.raises(Refused, match="debugging"):
        PATCH.rewrite(SourceFile(text), ())
