"""Memory over one training step as a picture: stacked by component, with the peak and the device's limit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import BadInput, import_extra
from flatout.memory.predict.estimate import MemoryEstimate
from flatout.memory.trace.record import COMPONENTS, Component
from flatout.units import show_bytes

SUFFIXES = (".png", ".svg")
GIB = 2**30
MIB = 2**20
# Blues lie under a step whatever it computes; warm colours come and go within it.
COLOURS: dict[Component, str] = {
    "parameters": "#1f4e79",
    "buffers": "#8fa9c4",
    "optimizer state": "#3f7fb5",
    "gradients": "#7fb6dd",
    "inputs": "#9c9c9c",
    "autocast copies": "#8c7bb8",
    "activations": "#e8943a",
    "temporaries": "#f2c879",
    "workspaces": "#c8553d",
}
BAND_COLOURS = {"forward": "#f4f4f4", "backward": "#ffffff", "optimizer": "#ececec", "setup": "#ffffff"}
INK = "#222222"
SMALLEST_SHARE = 0.002  # of the peak; a thinner layer has no visible height
STEPS = {"first": "the first step", "next": "a step after the first"}


def plot_estimate(estimate: MemoryEstimate, path: Path, *, capacity_bytes: int | None = None) -> Path:
    """Draw `estimate` into a PNG or SVG file, by the suffix of `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is neither a .png nor a .svg file", hint="give one of these endings")
    if not estimate.timeline.events:
        raise BadInput("the estimate has no step to draw: its trace is empty")
    figures = import_extra("matplotlib.figure", extra="plots")
    canvas = import_extra("matplotlib.backends.backend_agg", extra="plots")
    figure = figures.Figure(figsize=(10, 5.6), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    top_bytes = max(estimate.peak_reserved_bytes, *estimate.timeline.total_bytes())
    scale, unit = (GIB, "GiB") if top_bytes >= GIB else (MIB, "MiB")
    # A limit far above the step would press it flat against the floor: it is then named, not drawn.
    draws_capacity = capacity_bytes is not None and capacity_bytes <= 3 * top_bytes
    height = (max(top_bytes, capacity_bytes or 0) if draws_capacity else top_bytes) / scale
    axes.set_ylim(0, height * 1.16)
    axes.set_xlim(0, max(1, estimate.timeline.events[-1]))
    _draw_phases(axes, estimate)
    _draw_components(axes, estimate, scale)
    _draw_limits(axes, estimate, scale, capacity_bytes if draws_capacity else None)
    _draw_peak(axes, estimate, scale)
    _label(figure, axes, estimate, unit, capacity_bytes)
    figure.savefig(path, dpi=150, format=path.suffix.lower()[1:])
    return path


def _draw_phases(axes: Any, estimate: MemoryEstimate) -> None:
    timeline = estimate.timeline
    last = timeline.events[-1]
    starts = [*timeline.phases, (last, "setup")]
    for (start, phase), (end, _phase) in itertools.pairwise(starts):
        if end <= start:
            continue
        axes.axvspan(start, end, color=BAND_COLOURS[phase], linewidth=0, zorder=0)
        if start:
            axes.axvline(start, color="#bdbdbd", linewidth=0.8, zorder=1)
        if end - start >= 0.04 * last:
            axes.text(
                (start + end) / 2,
                0.985,
                phase,
                transform=axes.get_xaxis_transform(),
                horizontalalignment="center",
                verticalalignment="top",
                fontsize=10,
                color="#666666",
            )


def _draw_components(axes: Any, estimate: MemoryEstimate, scale: int) -> None:
    timeline = estimate.timeline
    least = SMALLEST_SHARE * max(timeline.total_bytes())
    shown = [name for name in COMPONENTS if max(timeline.by_component.get(name, ()), default=0) > least]
    rows = [np.array(timeline.by_component[name]) / scale for name in shown]
    # Nothing changes between two events, so the edge is a stair.
    axes.stackplot(
        timeline.events,
        *rows,
        labels=shown,
        colors=[COLOURS[name] for name in shown],
        step="post",
        linewidth=0,
        zorder=2,
    )


def _draw_limits(axes: Any, estimate: MemoryEstimate, scale: int, capacity_bytes: int | None) -> None:
    reserved = estimate.peak_reserved_bytes
    lines = [(reserved, f"reserved {show_bytes(reserved)}", "#555555", "dashed", "right")]
    if capacity_bytes is not None:  # named at the other end, because both lines may lie close together
        lines.append((capacity_bytes, f"device {show_bytes(capacity_bytes)}", "#b3261e", "solid", "left"))
    for num_bytes, text, colour, style, side in lines:
        axes.axhline(num_bytes / scale, color=colour, linewidth=1.2, linestyle=style, zorder=4)
        axes.annotate(
            text,
            (1 if side == "right" else 0, num_bytes / scale),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-4 if side == "right" else 4, 3),
            textcoords="offset points",
            horizontalalignment=side,
            verticalalignment="bottom",
            fontsize=9,
            color=colour,
            zorder=5,
        )


def _draw_peak(axes: Any, estimate: MemoryEstimate, scale: int) -> None:
    timeline = estimate.timeline
    if timeline.peak is None:
        return
    at = timeline.events[timeline.peak]
    value = timeline.total_bytes()[timeline.peak] / scale
    axes.plot([at], [value], marker="o", markersize=6, color=INK, markeredgecolor="white", zorder=6)
    on_the_right = at > 0.55 * timeline.events[-1]
    operation = (estimate.peak_op or "").removeprefix("aten.").removesuffix(".default")
    place = f"\nin {_shorten(estimate.peak_module)}" if estimate.peak_module else ""
    axes.annotate(
        f"peak {show_bytes(estimate.peak_allocated_bytes)}\n{operation}{place}",
        (at, value),
        xytext=(-14 if on_the_right else 14, -34),
        textcoords="offset points",
        horizontalalignment="right" if on_the_right else "left",
        verticalalignment="top",
        fontsize=9,
        color=INK,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#bbbbbb", "alpha": 0.92},
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8},
        zorder=6,
    )


def _shorten(name: str, *, most: int = 40) -> str:
    return name if len(name) <= most else f"…{name[-most + 1 :]}"


def _label(figure: Any, axes: Any, estimate: MemoryEstimate, unit: str, capacity_bytes: int | None) -> None:
    sizes = "  ".join(f"{name}={value}" for name, value in estimate.sizes.items())
    parts = [part for part in (sizes, estimate.precision, estimate.device) if part]
    if capacity_bytes is not None:
        parts.append(f"{estimate.peak_reserved_bytes / capacity_bytes:.0%} of {show_bytes(capacity_bytes)}")
    axes.set_title("   ·   ".join(parts), loc="left", fontsize=11, color=INK)
    axes.set_ylabel(f"GPU memory in use ({unit})", color=INK)
    axes.set_xlabel(f"allocations and frees of {STEPS[estimate.timeline.step]}", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
