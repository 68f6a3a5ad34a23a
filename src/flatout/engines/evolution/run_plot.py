"""A run as a picture: whether it learned, how fast it scored, and what that cost against plain inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flatout.engines.evolution.training.records import EpochRecord
from flatout.ground.errors import BadInput
from flatout.page.charts import Axes, Curve, Drawing, curves
from flatout.page.figures import write_figure
from flatout.page.scales import round_scale, step_scale, zero_scale

Value = Callable[[EpochRecord], float | None]
UNTRAINED = "optimizer"  # a colour, as those of the curves are
# Per panel: its title, and the curves in it by name, with their colour and value.
PANELS: Mapping[str, Mapping[str, tuple[str, Value]]] = {
    "reward": {
        "training prompts": ("forward", lambda record: record.reward_train),
        "held-out prompts": ("accent", lambda record: record.reward_heldout),
    },
    "rewards per second": {"rewards per second": ("backward", lambda record: record.rewards_per_s)},
    "share of plain inference": {"share of plain inference": ("wait", lambda record: record.plain_share)},
}


def plot_run(records: Sequence[EpochRecord], path: Path, *, title: str = "") -> Path:
    """Draw the curves of a run into a PNG or SVG file; one that is nowhere known is named as such."""
    if not records:
        raise BadInput("the run has no epoch to draw", hint="let it finish one")
    return write_figure(path, panels_of(records), title=title, num_columns=1)


def panels_of(records: Sequence[EpochRecord]) -> dict[str, Drawing | None]:
    """The curves of a run by their titles; None where nothing is known."""
    return {name: _panel(records, name) for name in PANELS}


def _panel(records: Sequence[EpochRecord], name: str) -> Drawing | None:
    # Epochs without a value are left out, so that evaluations made now and then are joined to a line.
    lines = [
        Curve(name=curve, colour=colour, points=[(record.epoch, value(record)) for record in records])
        for curve, (colour, value) in PANELS[name].items()
    ]
    first, last = records[0], records[-1]
    if name == "reward" and first.epoch == 0 and first.reward_heldout is not None:
        level = first.reward_heldout
        points = [(0, level), (max(last.epoch, 1), level)]
        lines.append(Curve(name="untrained", colour=UNTRAINED, points=points, dashed=True))
    values = [value for line in lines for _, value in line.known]
    if not values:
        return None
    # Of a speed, zero is part of the picture.
    up = round_scale(min(values), max(values)) if name == "reward" else zero_scale(max(values), "{:g}".format)
    across = step_scale(first.epoch, max(last.epoch, first.epoch + 1), unit="epochs")
    return curves(lines, Axes(across=across, up=up, height=170), shows_last=True)
