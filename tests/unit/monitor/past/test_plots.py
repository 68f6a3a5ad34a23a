"""Plots of a run as pictures that can be opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.errors import BadInput
from flatout.monitor.past.plots import PANELS, plot_run
from flatout.monitor.past.recorded import read_recorded
from flatout.monitor.sample import Sample
from tests.support.monitor import START_S, kept_run, story

images = pytest.importorskip("matplotlib.image")


def test_a_png_holds_all_panels(tmp_path: Path) -> None:
    recorded = read_recorded(kept_run(tmp_path, story(seconds=60)))
    path = plot_run(recorded, tmp_path / "deep" / "run.png")
    height, width, _ = images.imread(path).shape
    assert width == 12 * 130
    assert height > 130 * 2 * len(PANELS) / 2
    assert [each.name for each in path.parent.iterdir()] == ["run.png"]


def test_a_run_without_a_gpu_has_fewer_panels_and_any_name_is_text(tmp_path: Path) -> None:
    whole = plot_run(read_recorded(kept_run(tmp_path, story(seconds=20))), tmp_path / "a.png")
    samples = story(seconds=20, gpus=False)
    recorded = read_recorded(kept_run(tmp_path, samples, pid=2, name="$\\frac{$ <b>\x1b"))
    less = plot_run(recorded, tmp_path / "b.png")
    assert images.imread(less).shape[0] < images.imread(whole).shape[0]


def test_an_svg_and_a_run_of_one_sample(tmp_path: Path) -> None:
    recorded = read_recorded(kept_run(tmp_path, (Sample(time_s=START_S),)))
    assert plot_run(recorded, tmp_path / "run.svg").read_text().startswith("<?xml")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    recorded = read_recorded(kept_run(tmp_path, story(seconds=6)))
    with pytest.raises(BadInput, match=r"neither a .png nor a .svg"):
        plot_run(recorded, tmp_path / "run.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        plot_run(recorded, tmp_path / "file" / "run.png")
