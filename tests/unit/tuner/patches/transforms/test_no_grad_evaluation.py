"""Functions that evaluate lose their gradients; those whose values may need one keep them."""

from __future__ import annotations

import pytest
import torch

from flatout.tuner.patches.source import Refused, SourceFile
from flatout.tuner.patches.transforms.no_grad_evaluation import PATCH
from tests.unit.tuner.patches.test_patch import compiled, rewrite

TEXT = """
import torch
class Trainer:
    def validate(self, model, batches):
        model.eval()
        hits = 0
        for x in batches:
            y = model(x)
            assert not y.requires_grad or not STRICT
            hits += (y > 0).sum().item()
        model.train()
        return {"hits": float(hits), "all": len(batches)}
"""


def test_an_evaluation_runs_without_gradients() -> None:
    new = rewrite(PATCH, TEXT)
    assert "    @torch.no_grad()\n    def validate(" in new
    found = []
    for text, strict in ((TEXT, False), (new, True)):
        module = compiled(text)
        vars(module)["STRICT"] = strict
        torch.manual_seed(0)
        found.append(module.Trainer().validate(torch.nn.Linear(2, 2), [torch.ones(3, 2)]))
    assert found[0] == found[1]


def test_a_name_that_only_holds_numbers_is_a_number() -> None:
    returned = 'return {"hits": float(hits), "all": len(batches)}'
    new = TEXT.replace(returned, "share = hits / len(batches)\n        return share, hits")
    assert "@torch.no_grad()" in rewrite(PATCH, new)
    with pytest.raises(Refused, match="may need its gradient"):
        PATCH.rewrite(SourceFile(new.replace("hits += (y > 0).sum().item()", "hits += y.sum()")), ())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('return {"hits": float(hits), "all": len(batches)}', "return y", "may need its gradient"),
        ("model.train()", "y.backward()", "trains"),
        ("model.eval()", "model.eval(); torch.no_grad()", "already"),
        ("hits = 0", "hits = 0; yield 1", "generator"),
        ("model.eval()", "model.train()", "calls eval"),
    ],
)
def test_what_may_learn_is_refused(old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(Refused, match=words):
        PATCH.rewrite(SourceFile(TEXT.replace(old, new)), ())
