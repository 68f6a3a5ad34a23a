"""One call for all rows gives what a call for each gave; or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.one_forward import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

PLANTED = Path(__file__).parents[5] / "tests" / "planted" / "batch_of_one_forwards" / "planted.py"
WAYS = (
    "[model(row) for row in x.split(1)]",
    "[model(x[i:i + 1]) for i in range(len(x))]",
    "[model(x[i].unsqueeze(0)) for i in range(x.size(0))]",
    "[model(x[i][None]) for i in range(x.shape[0])]",
)


@pytest.mark.parametrize("way", WAYS)
def test_results_are_the_same(way: str) -> None:
    text = f"import torch\ndef run(model, x):\n    return torch.cat({way})\n"
    new = rewrite(PATCH, text)
    assert "return model(x)" in new
    x, model = torch.randn(4, 3), torch.nn.Linear(3, 2)
    torch.testing.assert_close(compiled(text).run(model, x), compiled(new).run(model, x))


def test_the_planted_loop_becomes_one_call() -> None:
    assert "    return model(molecules).squeeze(-1)\n" in rewrite(PATCH, PLANTED.read_text(), 21)


@pytest.mark.parametrize(
    "way",
    [
        "[model(row) for row in x.split(2)]", "[model(x[i:i + 2]) for i in range(len(x))]",
        "[model(x[i:i + 1]) for i in range(len(y))]", "[model(x[i:i + 1], i) for i in range(len(x))]",
        "[models[i](x[i:i + 1]) for i in range(len(x))]", "[model(row) for row in x]",
        "[model(x[i:i + 1]) for i in range(1, len(x))]",
    ],
)  # fmt: skip
def test_other_loops_are_refused(way: str) -> None:
    with pytest.raises(Refused):
        PATCH.rewrite(SourceFile(f"import torch\ndef run(model, x):\n    return torch.cat({way})\n"), ())
