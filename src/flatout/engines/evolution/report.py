"""A run as a picture and as one HTML page: whether it learned, what it says now, which weights moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.engines.evolution.training.records import EpochRecord, ShownAnswer, read_log
from flatout.engines.run.log import read_header
from flatout.ground.errors import BadInput
from flatout.ground.units import show, show_seconds, show_share
from flatout.page.charts import Axes, Curve, Drawing, curves
from flatout.page.document import document, write_page
from flatout.page.figures import write_figure
from flatout.page.inline import inline
from flatout.page.markup import Html, facts, known, listing, section, tag
from flatout.page.printable import shorten
from flatout.page.scales import round_scale, step_scale, zero_scale

LONGEST_TEXT = 1200
SHOWN_SETTINGS = (
    *("population", "prompts", "rank", "sigma", "sigma_schedule", "lr", "lr_schedule", "optimizer"),
    *("shaping", "noise", "arithmetic", "max_new_tokens", "temperature", "mode", "dtype", "seed"),
)
Value = Callable[[EpochRecord], float | None]
UNTRAINED_COLOUR = "optimizer"
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
    """Draw the curves of a run, by their titles; None where nothing is known."""
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
        lines.append(Curve(name="untrained", colour=UNTRAINED_COLOUR, points=points, dashed=True))
    values = [value for line in lines for _, value in line.known]
    if not values:
        return None
    # Of a speed, zero is part of the picture.
    up = round_scale(min(values), max(values)) if name == "reward" else zero_scale(max(values), "{:g}".format)
    across = step_scale(first.epoch, max(last.epoch, first.epoch + 1), unit="epochs")
    return curves(lines, Axes(across=across, up=up, height=170), shows_last=True)


def write_report(folder: Path, path: Path) -> Path:
    """Write the page of the run in a folder, from its log."""
    records = read_log(folder)
    if not records:
        raise BadInput(f"the run in {folder} has no epoch to report", hint="let it finish one")
    write_page(page(records, read_header(folder).get("settings", {}), name=folder.name), path)
    return path


def page(records: Sequence[EpochRecord], settings: Mapping[str, Any], *, name: str) -> str:
    """Write the whole document."""
    first, last = records[0], records[-1]
    return document(
        name,
        (_curves(records), *_samples(records), *_weights(first), _settings(settings)),
        kind="Report of an evolution run",
        where=(str(settings.get("task", "")), str(settings.get("model", ""))),
        verdict=headline(records),
        figures=(
            ("epochs", str(last.epoch)),
            ("members", known(settings.get("population"), str)),
            ("rewards per second", known(last.rewards_per_s, "{:,.0f}".format)),
            ("of plain inference", known(last.plain_share, show_share)),
            ("failed rewards, last epoch", known(last.failed_rows, str)),
        ),
        footer=(("took", known(last.elapsed_s, show_seconds)), ("flatout", __version__)),
        version=__version__,
    )


def headline(records: Sequence[EpochRecord]) -> str:
    """Say what the run found, in one sentence."""
    scores = [record.reward_heldout for record in records if record.reward_heldout is not None]
    if not scores:
        return "No held-out prompt has been scored yet."
    if len(scores) == 1:
        return f"The held-out prompts score {scores[0]:.3f} before training."
    return f"The held-out prompts score {scores[-1]:.3f}, and {scores[0]:.3f} before training."


def _curves(records: Sequence[EpochRecord]) -> Html:
    shown = [
        tag("div", tag("h3", title), inline(chart))
        for title, chart in panels_of(records).items()
        if chart is not None
    ]
    return section("Learning", tag("div", *shown, class_="panels"), anchor="learning")


def _samples(records: Sequence[EpochRecord]) -> Iterator[Html]:
    """Yield the same held-out prompts at the first and the last evaluation."""
    evaluated = [record for record in records if record.samples]
    if not evaluated:
        return
    before = {sample.prompt: sample for sample in evaluated[0].samples}
    last = evaluated[-1]
    note = "Held-out prompts, answered by the weights themselves; long texts are cut."
    rows = [
        _sample(sample, before.get(sample.prompt) if last is not evaluated[0] else None, last.epoch)
        for sample in last.samples
    ]
    yield section("What it answers", tag("p", note, class_="note"), *rows, anchor="samples")


def _sample(now: ShownAnswer, before: ShownAnswer | None, epoch: int) -> Html:
    said = [] if before is None else [_said("before training", before)]
    return tag(
        "div",
        tag("div", tag("p", tag("b", "prompt "), shorten(now.prompt, LONGEST_TEXT))),
        tag("div", *said, _said(f"epoch {epoch}", now)),
        class_="sample",
    )


def _said(when: str, sample: ShownAnswer) -> Html:
    reward = show(sample.reward, "{:.3g}")
    text = shorten(sample.completion, LONGEST_TEXT) or "(nothing)"
    return tag("p", tag("b", f"{when}, reward {reward} "), text)


def _weights(first: EpochRecord) -> Iterator[Html]:
    for title, names in (
        ("Weights that got noise", first.perturbed),
        ("Weights left as they are", first.frozen),
    ):
        shown = listing(title, names)
        if shown is not None:
            yield shown


def _settings(settings: Mapping[str, Any]) -> Html:
    pairs = [
        (name.replace("_", " "), str(settings[name]))
        for name in SHOWN_SETTINGS
        if settings.get(name) is not None
    ]
    return section("Settings", facts(pairs), anchor="settings")
