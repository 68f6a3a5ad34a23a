"""Charts of a run: gaps stay gaps, limits do not flatten, and one picture holds them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flatout.ground.errors import BadInput
from flatout.monitor.past.charts import (
    CHARTS,
    bounds_over_time,
    phases_over_time,
    plot_run,
    time_chart,
)
from flatout.monitor.past.outline import RunOutline, Stretch, read_outline
from flatout.monitor.sample import Sample
from flatout.monitor.verdicts.window import Verdict
from tests.support.monitor import START_S, kept_run, story


def recorded(folder: Path, **options: object) -> RunOutline:
    return read_outline(kept_run(folder, story(**{"seconds": 60, **options})))  # type: ignore[arg-type]


def panels_of(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return [text.text or "" for text in root.iter() if text.get("font-size") == "12"]


def test_every_chart_of_a_full_run_is_drawn(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert [wanted.title for wanted in CHARTS if time_chart(run, wanted) is None] == []
    path = plot_run(run, tmp_path / "deep" / "run.svg")
    assert len(panels_of(path)) == len(CHARTS) + 2
    assert [each.name for each in path.parent.iterdir()] == ["run.svg"]


def test_a_run_without_a_gpu_has_fewer_panels_and_any_name_is_text(tmp_path: Path) -> None:
    whole = panels_of(plot_run(recorded(tmp_path), tmp_path / "a.svg"))
    samples = story(seconds=20, gpus=False)
    run = read_outline(kept_run(tmp_path, samples, pid=2, name="$\\frac{$ <b>\x1b"))
    less = plot_run(run, tmp_path / "b.svg")
    assert len(panels_of(less)) < len(whole)
    assert "$\\frac{$ <b>\ufffd" in "".join(ElementTree.fromstring(less.read_text()).itertext())


def test_a_png_can_be_opened(tmp_path: Path) -> None:
    images = pytest.importorskip("matplotlib.image")
    height, width, _ = images.imread(plot_run(recorded(tmp_path), tmp_path / "run.png")).shape
    assert width == 1650 and height > 1200


def test_a_run_of_one_sample_is_drawn(tmp_path: Path) -> None:
    run = read_outline(kept_run(tmp_path, (Sample(time_s=START_S),)))
    assert plot_run(run, tmp_path / "run.svg").read_text().startswith("<?xml")
    assert phases_over_time(run) is None


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a .png nor a .svg"):
        plot_run(recorded(tmp_path), tmp_path / "run.jpg")


def test_a_limit_far_above_is_named_not_drawn(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    (memory,) = (wanted for wanted in CHARTS if wanted.limit and wanted.limit[0] == "capacity")
    near = [
        replace(point, gpus=tuple(replace(gpu, memory_total_bytes=80 * 2**30) for gpu in point.gpus))
        for point in run.points
    ]
    for points, num in ((tuple(near), 1), (run.points, 0)):
        chart = time_chart(replace(run, points=points), memory)
        assert chart is not None and chart.legend[-1].name.startswith("capacity ")
        assert sum(mark.colour == "accent" for mark in chart.marks) == num


def test_the_strip_has_a_cell_per_stretch(tmp_path: Path) -> None:
    verdict = Verdict(bound="data", sentence="the loader is <slow>", action="look")
    run = recorded(tmp_path)
    start_s, half_s = run.start_s, run.duration_s / 2
    stretches = (
        Stretch(start_s=start_s, end_s=start_s + half_s, verdict=verdict),
        Stretch(start_s=start_s + half_s, end_s=start_s + 2 * half_s, verdict=None),
    )
    (row,) = bounds_over_time(replace(run, stretches=stretches)).rows
    assert [mark.colour for mark in row.marks] == ["wait", "line"]
    assert [mark.at[1][0] - mark.at[0][0] for mark in row.marks] == pytest.approx([0.5, 0.5])
    assert row.marks[0].title == "0:00: data: the loader is <slow>"
