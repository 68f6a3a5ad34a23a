"""The picture shows the step: its layers, its peak and the device's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.memory.plot import COLOURS, plot_estimate
from flatout.memory.predict.estimate import estimate
from flatout.memory.trace.record import COMPONENTS
from tests.support.memory import TraceBuilder, layered_step

GIB = 2**30


def svg_of(tmp_path: Path, *, capacity_bytes: int | None, batch_size: int = 64) -> str:
    """The picture as text, in which words are words."""
    found = estimate(layered_step(batch_size=batch_size, width=1024, num_layers=12), precision="bf16")
    path = plot_estimate(found, tmp_path / "step.svg", capacity_bytes=capacity_bytes)
    return path.read_text(encoding="utf-8")


def test_a_png_and_an_svg_are_written(tmp_path: Path) -> None:
    found = estimate(layered_step())
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")):
        path = plot_estimate(found, tmp_path / f"step{suffix}")
        assert path.read_bytes().startswith(start)
        assert path.stat().st_size > 10_000


def test_it_names_the_layers_phases_peak_and_limits(tmp_path: Path) -> None:
    text = svg_of(tmp_path, capacity_bytes=GIB)
    words = ["activations", "parameters", "optimizer state", "forward", "backward", "peak ", "mm", "bf16"]
    words += ["batch_size=64", "reserved ", "device 1.00 GiB", "of 1.00 GiB", "in layers.11"]
    assert [word for word in words if word not in text] == []
    assert COLOURS["activations"] in text


def test_a_layer_without_height_is_left_out(tmp_path: Path) -> None:
    assert "buffers" not in svg_of(tmp_path, capacity_bytes=None)


def test_a_limit_far_above_is_named_and_not_drawn(tmp_path: Path) -> None:
    text = svg_of(tmp_path, capacity_bytes=80 * GIB)
    assert "device 80.0 GiB" not in text
    assert "1% of 80.0 GiB" in text


def test_every_component_has_its_colour() -> None:
    assert set(COLOURS) == set(COMPONENTS)
    assert len(set(COLOURS.values())) == len(COMPONENTS)


def test_an_ending_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_estimate(estimate(layered_step()), tmp_path / "step.pdf")


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no step to draw"):
        plot_estimate(estimate(TraceBuilder().trace(batch_size=1)), tmp_path / "step.png")
