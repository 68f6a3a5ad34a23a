"""The picture as a whole: it fills its terminal exactly, whatever there is to show."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.segment import Segment

from flatout.monitor.sample import GpuSample, Sample
from flatout.monitor.terminal.screen import Screen
from flatout.monitor.terminal.view import View
from tests.support.monitor import HOSTILE, START_S, story

HEALTHY = story(seconds=90)
STARVED = story(seconds=90, wait=0.41)
PICTURES = Path(__file__).resolve().parents[4] / "docs" / "images"
# rich's own format, without the font it would fetch from another host.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def shown(screen: Screen, *, width: int = 80, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    lines = console.render_lines(screen, console.options.update(height=height))
    return ["".join(segment.text for segment in line if segment.control is None) for line in lines]


@pytest.mark.parametrize("width", [20, 60, 80, 132])
@pytest.mark.parametrize("height", [2, 10, 24, 50])
def test_it_fills_the_terminal_exactly(width: int, height: int) -> None:
    lines = shown(Screen(samples=STARVED), width=width, height=height)
    assert len(lines) == height
    assert {Segment.get_line_length([Segment(line)]) for line in lines} == {width}
    assert lines[-1].startswith("q quit")


def test_everything_is_there_in_sixty_columns() -> None:
    text = "\n".join(shown(Screen(samples=STARVED), width=60, height=44))
    for word in ("train", "pid 4711", "running", "The loader is too slow", "FO101", "GPU 0 SM", "it/s"):
        assert word in text
    for word in ("loss", "wait", "backward", "RAM", "disk", "shm", "python3", "pt_data_worker"):
        assert word in text


def test_the_verdict_is_about_steps_and_says_what_to_do() -> None:
    lines = shown(Screen(samples=HEALTHY), width=120)
    assert lines[1].startswith("GPU 0 is the limit, as it should be")
    assert "flatout diagnose" in lines[2]


def test_a_low_terminal_loses_processes_first() -> None:
    lines = shown(Screen(samples=STARVED), width=100, height=21)
    text = "\n".join(lines)
    assert "The loader is too slow" in text and "CPU" in text
    assert "pt_data_worker" not in text


def test_processes_can_be_hidden_and_help_replaces_all() -> None:
    hidden = "\n".join(shown(Screen(samples=STARVED, view=View(shows_processes=False))))
    assert "python3" not in hidden
    helped = shown(Screen(samples=STARVED, view=View(shows_help=True)))
    assert "sort processes by the next column" in "\n".join(helped)
    assert "not say how much of the GPU" in " ".join("\n".join(helped).split())
    assert helped[-1].startswith("? back")


def test_what_happened_lately_is_told() -> None:
    noted = (*STARVED[:-1], replace(STARVED[-1], notes=("GPU 1 is lost: it fell off the bus",)))
    assert "GPU 1 is lost" in "\n".join(shown(Screen(samples=noted)))


def test_a_held_picture_says_so() -> None:
    assert shown(Screen(samples=STARVED, view=View(is_held=True)))[0].rstrip().endswith("held")


def test_no_driver_shows_the_host_and_one_sentence() -> None:
    lines = shown(Screen(samples=story(seconds=30, gpus=False)))
    text = "\n".join(lines[:-1])
    assert sum("no GPU: no NVIDIA driver" in line for line in lines) == 1
    assert "of 32 cores" in text and "it/s" in text and "GPU memory" not in text


def test_a_first_sample_without_anything_is_a_picture() -> None:
    lines = shown(Screen(samples=(Sample(time_s=START_S),)))
    assert len(lines) == 40


def test_a_still_picture_is_as_high_as_it_needs_to_be() -> None:
    console = Console(file=io.StringIO(), width=80, height=10, color_system=None)
    console.print(Screen(samples=STARVED, is_still=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 20 < len(lines) < 60
    assert not any("quit" in line for line in lines)
    assert "pt_data_worker" in lines[-1] or "jupyter" in "\n".join(lines[-6:])


def test_hostile_names_do_nothing_to_the_terminal() -> None:
    latest = STARVED[-1]
    assert latest.job is not None
    job = replace(latest.job, name=HOSTILE, missing={"phases": HOSTILE}, phases=None, device_phases=None)
    hostile = replace(
        latest,
        job=job,
        gpus=(GpuSample(index=0, name=HOSTILE),),
        notes=(HOSTILE,),
        missing={"gpus": HOSTILE},
    )
    for samples in ((hostile,) * 6, (replace(hostile, gpus=()),)):
        text = "\n".join(shown(Screen(samples=samples, title=HOSTILE), width=200))
        assert "[bold red]" in text
        assert not any(char in text for char in "\x1b\x07\u202e")


@pytest.fixture
def _greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_greenwich")
def test_the_picture_of_the_docs_is_this_one() -> None:
    """FLATOUT_PICTURES=1 writes it."""
    samples = story(seconds=121, wait=0.06, late_wait=0.38)
    console = Console(
        file=io.StringIO(), width=104, height=38, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(Screen(samples=samples), height=38, end="")
    svg = console.export_svg(title="flatout watch", code_format=SVG, unique_id="flatout")
    assert "https://" not in svg.replace("http://www.w3.org", "")
    path = PICTURES / "watch_terminal.svg"
    if os.environ.get("FLATOUT_PICTURES"):
        path.write_text(svg, encoding="utf-8")
    assert svg == path.read_text(encoding="utf-8")
