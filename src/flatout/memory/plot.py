"""Memory over one training step as a picture: stacked by component, with the peak and the device's limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes
from flatout.memory.predict.estimate import MemoryEstimate
from flatout.memory.trace.record import COMPONENTS, Component
from flatout.page.charts import PAD, Axes, Curve, Drawing, Key, Mark, stack
from flatout.page.figures import write_figure
from flatout.page.scales import Scale, binary_unit, zero_scale

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
SHADED = ("forward", "optimizer")  # phases with a band behind them
SMALLEST_SHARE = 0.002  # of the peak; a thinner layer has no visible height
LONGEST_NAME = 40  # of a module, in characters
NEAR = 3  # a limit further above the step would press it flat against the floor: it is named, not drawn
STEPS = {"first": "the first step", "next": "a step after the first"}


def plot_estimate(estimate: MemoryEstimate, path: Path, *, capacity_bytes: int | None = None) -> Path:
    """Draw `estimate` into a PNG or SVG file."""
    if not estimate.timeline.events:
        raise BadInput("the estimate has no step to draw: its trace is empty")
    sizes = "  ".join(f"{name}={value}" for name, value in estimate.sizes.items())
    parts = [part for part in (sizes, estimate.precision, estimate.device) if part]
    if capacity_bytes is not None:
        parts.append(f"{estimate.peak_reserved_bytes / capacity_bytes:.0%} of {show_bytes(capacity_bytes)}")
    title = f"GPU memory in use over {STEPS[estimate.timeline.step]}"
    panels = {title: memory_chart(estimate, capacity_bytes=capacity_bytes)}
    return write_figure(path, panels, title="   ·   ".join(parts), num_columns=1)


def memory_chart(estimate: MemoryEstimate, *, capacity_bytes: int | None = None) -> Drawing:
    """Draw the step over its allocations and frees: layers, phases, limits and the peak."""
    timeline = estimate.timeline
    totals = timeline.total_bytes()
    top = max(estimate.peak_reserved_bytes, *totals)
    if capacity_bytes is not None and capacity_bytes > NEAR * top:
        capacity_bytes = None
    high = max(top, capacity_bytes or 0) * 1.16
    axes = Axes(
        across=Scale(low=0, high=max(1, timeline.events[-1])),
        up=zero_scale(high, show_bytes, unit=binary_unit(high)),
        height=380,
        name_across="allocations and frees",
    )
    least = SMALLEST_SHARE * max(totals)
    shown = [name for name in COMPONENTS if max(timeline.by_component.get(name, ()), default=0) > least]
    layers = [
        Curve(
            name=name,
            colour=COLOURS[name],
            points=list(zip(timeline.events, timeline.by_component[name], strict=True)),
        )
        for name in shown
    ]
    # Nothing changes between two events, so the edge is a stair.
    drawn = stack(layers, axes, label="memory by component", is_stair=True)
    limits = [("reserved", estimate.peak_reserved_bytes, "soft", True)]
    limits += [("device", capacity_bytes, "bad", False)] if capacity_bytes is not None else []
    keys = [
        Key(name=f"{name} {show_bytes(size)}", colour=colour, kind="dashes")
        for name, size, colour, _ in limits
    ]
    return replace(
        drawn,
        marks=(
            *_phases(estimate, axes),
            *drawn.marks,
            *(axes.level(size, colour, dashed=dashed) for _, size, colour, dashed in limits),
            *_peak(estimate, axes),
        ),
        legend=(*reversed(drawn.legend), *keys),
    )


def _phases(estimate: MemoryEstimate, axes: Axes) -> Iterator[Mark]:
    timeline = estimate.timeline
    last = timeline.events[-1]
    bottom = axes.height + PAD
    for (start, phase), (end, _) in itertools.pairwise([*timeline.phases, (last, "setup")]):
        left, right = axes.across.share(start), axes.across.share(end)
        if phase in SHADED and right > left:
            yield Mark(shape="rect", at=((left, PAD), (right, bottom)), colour="raised")
        if start and end > start:
            yield Mark(shape="line", at=((left, PAD), (left, bottom)), colour="line")
        if right - left >= 0.04:
            at = (((left + right) / 2, PAD + 14),)
            yield Mark(shape="text", at=at, text=phase, anchor="middle", size=11, colour="soft")


def _peak(estimate: MemoryEstimate, axes: Axes) -> Iterator[Mark]:
    timeline = estimate.timeline
    if timeline.peak is None:
        return
    x, y = axes.place(timeline.events[timeline.peak], timeline.total_bytes()[timeline.peak])
    words = [
        f"peak {show_bytes(estimate.peak_allocated_bytes)}",
        (estimate.peak_op or "").removeprefix("aten.").removesuffix(".default"),
        f"in {_shorten(estimate.peak_module)}" if estimate.peak_module else "",
    ]
    shown = [word for word in words if word]
    width = 0.016 + 0.0066 * max(map(len, shown))
    left, edge = (x - 0.03 - width, x - 0.03) if x > 0.55 else (x + 0.03, x + 0.03)
    upper, lower = y + 26, y + 26 + 16 * len(shown) + 8
    yield Mark(shape="line", at=((x, y), (edge, upper)))
    yield Mark(shape="rect", at=((left, upper), (left + width, lower)), colour="paper", opacity=0.92)
    for number, word in enumerate(shown, start=1):
        yield Mark(shape="text", at=((left + 0.008, upper + 16 * number),), text=word, size=11)
    yield Mark(shape="dot", at=((x, y),), size=5.5, colour="paper")
    yield Mark(shape="dot", at=((x, y),), size=4)


def _shorten(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME + 1 :]}"
