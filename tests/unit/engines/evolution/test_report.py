"""The picture and the page of a run say whether it learned, and what is unknown stays unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flatout.engines.evolution.report import PANELS, UNTRAINED_COLOUR, headline, page, plot_run, write_report
from flatout.engines.evolution.training.records import KIND, EpochRecord, ShownAnswer
from flatout.engines.run.log import RunLog
from flatout.ground.errors import BadInput
from flatout.page.figures import LIGHT

RECORDS = [
    EpochRecord(
        epoch=epoch,
        reward_train=0.1 * epoch,
        reward_heldout=0.09 * epoch if epoch % 5 == 0 else None,
        rewards_per_s=1000.0 + epoch,
        plain_share=0.96,
    )
    for epoch in range(11)
]


def picture(path: Path) -> np.ndarray:  # type: ignore[type-arg]
    image = pytest.importorskip("matplotlib.image")
    return np.asarray(image.imread(path))


def has_colour(pixels: np.ndarray, colour: str) -> bool:  # type: ignore[type-arg]
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).any())


COLOURS = {name: LIGHT[colour] for curves in PANELS.values() for name, (colour, _) in curves.items()}


def test_every_curve_is_drawn(tmp_path: Path) -> None:
    path = plot_run(RECORDS, tmp_path / "run.png", title="digit-copy")
    pixels = picture(path)
    assert [name for name, colour in COLOURS.items() if not has_colour(pixels, colour)] == []
    assert sorted(tmp_path.iterdir()) == [path]


def test_what_is_nowhere_known_has_no_curve(tmp_path: Path) -> None:
    known = [EpochRecord(epoch=0, reward_train=0.5), EpochRecord(epoch=1, reward_train=0.6)]
    pixels = picture(plot_run(known, tmp_path / "run.png"))
    assert has_colour(pixels, COLOURS["training prompts"])
    assert not has_colour(pixels, COLOURS["rewards per second"])
    assert not has_colour(pixels, COLOURS["share of plain inference"])


def test_the_untrained_model_is_a_line(tmp_path: Path) -> None:
    assert has_colour(picture(plot_run(RECORDS, tmp_path / "run.png")), LIGHT[UNTRAINED_COLOUR])
    assert not has_colour(picture(plot_run(RECORDS[1:], tmp_path / "later.png")), LIGHT[UNTRAINED_COLOUR])


def test_a_picture_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    path.write_bytes(b"old")
    plot_run(RECORDS, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_run(RECORDS, tmp_path / "run.pdf")
    with pytest.raises(BadInput, match="no epoch to draw"):
        plot_run([], tmp_path / "run.png")


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
