"""Figure files: a picture that opens, with every chart in it, whatever its names are."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from flatout.ground.errors import BadInput
from flatout.page.charts import Chart
from flatout.page.figures import LIGHT, write_figure
from tests.unit.page.test_inline import HOSTILE, all_charts

PANELS: dict[str, Chart | None] = {f"{place} {HOSTILE}": chart for place, chart in enumerate(all_charts())}
PANELS["unknown"] = None
SVG = "{http://www.w3.org/2000/svg}"


def test_an_svg_holds_every_panel_in_literal_colours(tmp_path: Path) -> None:
    path = write_figure(tmp_path / "deep" / "run.SVG", PANELS, title="$x$ " + HOSTILE)
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    words = "".join(root.itertext())
    assert "$x$" in words and "n/a" in words and words.count("alert(1)") > len(PANELS)
    assert not list(root.iter(f"{SVG}script")) and "\x1b" not in text and "var(" not in text
    assert LIGHT["forward"] in text and [each.name for each in path.parent.iterdir()] == ["run.SVG"]


def test_every_mark_lies_on_the_canvas(tmp_path: Path) -> None:
    root = ElementTree.fromstring(write_figure(tmp_path / "a.svg", PANELS, title="").read_text())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for name, end in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.attrib.get(name, 0)) <= end


def test_a_png_has_the_colours_of_its_marks(tmp_path: Path) -> None:
    images = pytest.importorskip("matplotlib.image")
    path = write_figure(tmp_path / "run.png", PANELS, title="$\\frac{$ " + HOSTILE + " 日本")
    pixels = np.asarray(images.imread(path))
    assert pixels.shape[1] == 1650
    for name in ("paper", "forward", "up"):
        wanted = np.array([int(LIGHT[name][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).any(), name


def test_more_panels_make_a_higher_picture(tmp_path: Path) -> None:
    heights = [
        float(ElementTree.fromstring(write_figure(path, panels, title="").read_text()).attrib["height"])
        for path, panels in (
            (tmp_path / "a.svg", dict(list(PANELS.items())[:2])),
            (tmp_path / "b.svg", PANELS),
        )
    ]
    assert heights[0] < heights[1]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        write_figure(tmp_path / "run.jpg", PANELS, title="")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        write_figure(tmp_path / "file" / "run.svg", PANELS, title="")


def test_every_token_is_a_colour() -> None:
    assert len(LIGHT) > 20
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in LIGHT.values())
    assert {"paper", "ink", "soft", "line", "accent", "wait", "rest"} <= set(LIGHT)
