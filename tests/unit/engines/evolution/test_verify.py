"""Checks that hold for what is right, and name what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.evolution import verify as room
from flatout.engines.evolution.eggroll import Eggroll
from flatout.engines.evolution.rewards.worker import Failure
from flatout.engines.evolution.verify import Check, furthest, verify_evolution
from tests.support.evolution import save_tiny, tiny_llama, tiny_settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("verify")
    given = tiny_settings(save_tiny(folder / "model"), folder / "run", rank=2, sigma=0.3)
    return {**given, "task_options": {"length": 6, "token_ids": True}}


def test_every_optimisation_holds(settings: dict[str, Any]) -> None:
    told: list[str] = []
    found = verify_evolution(settings, on_progress=told.append)
    assert found.holds, found
    names = [check.name for check in found.checks]
    assert names == [
        "batch, cache and slots",
        "members in one batch",
        "tokenizer in one call",
        "rewards in processes",
        "one product per stack",
    ]
    assert len(told) == len(names) and not Path(settings["out"]).exists()


def test_a_wrong_sign_a_wrong_update_and_a_wrong_reward_are_found(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Eggroll.delta
    monkeypatch.setattr(Eggroll, "delta", lambda self, *which: -right(self, *which))
    monkeypatch.setattr(room, "score_row", lambda *_, index: Failure(index=index, kind="raised", message="x"))
    found = verify_evolution(settings)
    assert not found.holds
    assert [check.name for check in found.checks if not check.holds] == [
        "members in one batch",
        "rewards in processes",
        "one product per stack",
    ]


def test_the_distance_is_that_of_the_worst_token() -> None:
    model = tiny_llama()
    prompt = [1, 2, 3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert furthest(model, prompt, [best]) == 0.0 == furthest(model, prompt, [])
    expected = float((logits.max() - logits.min()) / logits.std())
    assert furthest(model, prompt, [worst]) == pytest.approx(expected)
    assert not Check(name="", against="", figure=expected, unit="deviations", limit=0.1).holds
