"""The picture of a run shows what is known of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flatout.engines.evolution.run_plot import PANELS, UNTRAINED, plot_run
from flatout.engines.evolution.training.records import EpochRecord
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
    assert has_colour(picture(plot_run(RECORDS, tmp_path / "run.png")), LIGHT[UNTRAINED])
    assert not has_colour(picture(plot_run(RECORDS[1:], tmp_path / "later.png")), LIGHT[UNTRAINED])


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
