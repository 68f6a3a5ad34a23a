"""The page of a run: whether it learned, what it says, and which weights moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.evolution.report import headline, page, write_report
from flatout.engines.evolution.training.records import KIND, EpochRecord, ShownAnswer
from flatout.engines.run.log import RunLog
from flatout.ground.errors import BadInput

FIRST = EpochRecord(
    epoch=0,
    reward_heldout=0.25,
    samples=(ShownAnswer(prompt="2+2=", completion="<b>5</b>", reward=0.0),),
    perturbed=("model.layers.*.mlp.down_proj (30 x 1)",),
    frozen=("model.embed_tokens.weight (7)",),
)
LAST = EpochRecord(
    epoch=3,
    reward_train=0.4,
    reward_heldout=0.5,
    samples=(ShownAnswer(prompt="2+2=", completion="4", reward=None),),
)


def test_a_page_shows_what_was_said_before_and_after_with_its_reward() -> None:
    found = page([FIRST, LAST], {"population": 64, "task": "sums.jsonl", "sigma": 0.01}, name="a run")
    assert "score 0.500, and 0.250 before training" in found
    assert "before training, reward 0 " in found and "epoch 3, reward n/a " in found
    assert "&lt;b&gt;5&lt;/b&gt;" in found and "<b>5</b>" not in found
    assert "model.embed_tokens.weight (7)" in found and "down_proj (30 x 1)" in found
    assert "sums.jsonl" in found and "<dd>0.01</dd>" in found


def test_a_run_that_was_not_scored_says_so() -> None:
    assert headline([EpochRecord(epoch=1)]) == "No held-out prompt has been scored yet."
    assert headline([FIRST]) == "The held-out prompts score 0.250 before training."


def test_a_page_is_made_from_the_log_alone(tmp_path: Path) -> None:
    with RunLog(tmp_path, KIND, settings={"population": 8}, tensorboard=False) as log:
        with pytest.raises(BadInput, match="has no epoch to report"):
            write_report(tmp_path, tmp_path / "page.html")
        log.write(FIRST)
        log.write(LAST)
    written = write_report(tmp_path, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "2+2=" in written and "8" in written
