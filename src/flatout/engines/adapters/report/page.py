"""A run of adapters as one HTML page that needs nothing else: no host, no font, no script.

It answers, in this order: what does the router cost against a perfect one, what are the adapters worth, where
do rows go wrong, can its confidence be believed, and how did it all learn.  Style and escaping are those of a
diagnosis's page, so that a text from the data can never become markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout import __version__
from flatout.atomic_files import write_whole
from flatout.engines.adapters.evaluation.results import ROUTINGS, Evaluation, RoutingQuality, ShownRow
from flatout.engines.adapters.report.curves import Line, curve, loss_line, routing_line, validation_line
from flatout.engines.adapters.report.drawings import (
    confidence_bars,
    confusion,
    dots,
    load_bars,
    reliability,
    show_exact_share,
    show_points,
    transfer,
)
from flatout.engines.adapters.training.log import StepRecord
from flatout.page.document import document
from flatout.page.markup import Html, facts, section, table, tag
from flatout.units import UNKNOWN, show_seconds, show_share

LONGEST_TEXT = 320
ROUTER_TERMS = ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature")
PHASES = {"phase1": "Adapters", "phase2": "The router", "phase3": "Both together"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What is known of a run; an evaluation or a log may be missing."""

    name: str
    model: str
    evaluation: Evaluation | None = None
    records: tuple[StepRecord, ...] = ()
    device: str | None = None
    notes: tuple[str, ...] = ()


def page(report: RunReport) -> str:
    """The whole document."""
    parts: list[Html | None] = [_masthead(report)]
    if report.evaluation is not None:
        parts += [_scores(report.evaluation), *_routing(report.evaluation), _transfer(report.evaluation)]
        parts.append(_shown(report.evaluation))
    parts += [*_learning(report), _notes(report)]
    return document(
        f"flatout: {report.name}",
        parts,
        footer=_footer(report),
        version=__version__,
        styles=[("flatout.engines.adapters.report", "report.css")],
    )


def write_page(report: RunReport, path: Path) -> None:
    """Whole or not at all: a browser never opens half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page(report).encode())


def headline(report: RunReport) -> str:
    """What the run came to."""
    found = report.evaluation
    if found is None:
        return "Not evaluated yet." if report.records else "Nothing has been trained yet."
    if found.routing is None:
        return f"{_tasks(found)} under their own adapters; no router has been trained yet."
    num_rows = sum(found.num_rows.values())
    sentence = (
        f"The router sends {show_exact_share(found.routing.accuracy_share)} of {num_rows:,} unseen rows "
        "to the right adapter"
    )
    gap = largest_gap(found)
    if gap is None:
        return sentence + "."
    task, points = gap
    if points <= 0:
        return f"{sentence}; no task scores lower than under a perfect router."
    return f"{sentence}; against a perfect one that costs at most {points:.1f} points ({task})."


def largest_gap(evaluation: Evaluation) -> tuple[str, float] | None:
    """The task that loses most by routing, and how many points."""
    gaps = {
        task: oracle - routed
        for task in evaluation.tasks
        if (oracle := evaluation.score(task, "oracle")) is not None
        and (routed := evaluation.score(task, "routed")) is not None
    }
    return max(gaps.items(), key=lambda item: item[1]) if gaps else None


def _tasks(evaluation: Evaluation) -> str:
    number = len(evaluation.tasks)
    return "One task" if number == 1 else f"{number} tasks"


def _masthead(report: RunReport) -> Html:
    where = [report.model, *([report.device] if report.device else [])]
    return tag(
        "header",
        tag("p", "Report of an adapters run", class_="kicker"),
        tag("h1", report.name),
        tag("p", " · ".join(where), class_="where"),
        tag("p", headline(report), class_="verdict"),
        facts(_figures(report), kind="figures"),
    )


def _figures(report: RunReport) -> Iterator[tuple[str, str]]:
    found = report.evaluation
    if found is None:
        return
    yield "tasks", str(len(found.tasks))
    yield f"{found.split} rows", f"{sum(found.num_rows.values()):,}"
    if found.routing is not None:
        yield "routed rightly", show_exact_share(found.routing.accuracy_share)
    if (mean := found.mean("oracle")) is not None:
        yield "mean, oracle", show_points(mean)
    if (mean := found.mean("routed")) is not None:
        yield "mean, routed", show_points(mean)
    if (mean := found.mean("end-to-end")) is not None:
        yield "mean, end-to-end", show_points(mean)
    better = [
        oracle > heads
        for task in found.tasks
        if (heads := found.heads_only_score(task)) is not None
        and (oracle := found.score(task, "oracle")) is not None
    ]
    if better:
        yield "adapters beat heads-only", f"{sum(better)} of {len(better)}"


# Scores


def _scores(evaluation: Evaluation) -> Html:
    present = [name for name in ROUTINGS if any(each.routing == name for each in evaluation.scores)]
    heads = ["task", "metric", "rows", *present]
    if evaluation.heads_only is not None:
        heads.append("heads-only")
    rows = []
    for task in evaluation.tasks:
        row = [task, evaluation.metrics[task], f"{evaluation.num_rows[task]:,}"]
        row += [show_points(evaluation.score(task, name)) for name in present]
        if evaluation.heads_only is not None:
            row.append(show_points(evaluation.heads_only_score(task)))
        rows.append(row)
    note = (
        f"Points from 0 to 100 on {evaluation.split} rows. Oracle: every row under its own task's adapter. "
        "Routed: under what the router chose. Uniform: all adapters with equal weights. Random: an adapter "
        "drawn per row. In all of these the row's own head answers; end-to-end, rows that the router took "
        "for another task's count as not answered."
    )
    if evaluation.best_single is not None:
        note += f" Single: all rows under the adapter of {evaluation.best_single}, the best on average."
    if evaluation.heads_only is not None:
        note += " Heads-only: a run whose encoder stayed as it was and trained heads alone."
    return section(
        "Scores",
        dots(evaluation),
        table(heads, rows, numbers=range(2, len(heads))),
        tag("p", note, class_="note"),
        _all_scores(evaluation),
        anchor="scores",
    )


def _all_scores(evaluation: Evaluation) -> Html:
    """Every score of every task, folded away."""
    oracle = next((each for each in evaluation.scores if each.routing == "oracle"), None)
    routed = next((each for each in evaluation.scores if each.routing == "routed"), None)
    rows = []
    for task in evaluation.tasks:
        known = {} if oracle is None else oracle.by_task.get(task, {})
        chosen = {} if routed is None else routed.by_task.get(task, {})
        alone = (evaluation.heads_only or {}).get(task, {})
        for name in dict.fromkeys((*known, *chosen)):
            values = (known.get(name), chosen.get(name), alone.get(name))
            rows.append((task, name, *(show_points(value) for value in values)))
    listed = table(("task", "score", "oracle", "routed", "heads-only"), rows, numbers=(2, 3, 4))
    return tag("details", tag("summary", "Every score"), listed)


# Routing


def _routing(evaluation: Evaluation) -> Iterator[Html]:
    quality = evaluation.routing
    if quality is None:
        return
    note = "Shares of each task's rows by the adapter chosen first. On the diagonal the choice is right."
    by_task = ", ".join(
        f"{task} {show_exact_share(share)}" for task, share in quality.accuracy_by_task.items()
    )
    yield section(
        "Where rows go",
        confusion(quality, evaluation.tasks),
        tag("p", f"Right by task: {by_task}. {note}", class_="note"),
        anchor="confusion",
    )
    yield section(
        "Whether to believe it",
        tag("div", confidence_bars(quality), reliability(quality), class_="pair"),
        tag("p", _confidence_note(quality), class_="note"),
        anchor="confidence",
    )
    yield section("Load and entropy", load_bars(quality), facts(_routing_facts(quality)), anchor="load")


def _confidence_note(quality: RoutingQuality) -> str:
    words = (
        "Left: rows by the confidence of their routing. Right: of the rows with some confidence, the share "
        "that is right; a larger dot is more rows, and on the dashed line confidence can be taken at its "
        f"word. Mean distance from it: {show_share(quality.calibration_error)}."
    )
    if quality.threshold > 0:
        below = "its best adapter alone" if quality.fallback == "best" else "all adapters with equal weights"
        words += (
            f" At a threshold of {quality.threshold:g}, {show_share(quality.sure_share)} of the rows are "
            f"sure, and {show_exact_share(quality.sure_accuracy_share)} of those right; "
            f"any other row gets {below}."
        )
    return words


def _routing_facts(quality: RoutingQuality) -> Iterator[tuple[str, str]]:
    yield "entropy of a row", f"{quality.entropy_nats:.3f} nats"
    yield "balance of use (1 is even)", UNKNOWN if quality.balance is None else f"{quality.balance:.3f}"
    yield "calibration error", show_exact_share(quality.calibration_error)
    yield "temperature", f"{quality.temperature:.3g}"
    yield "adapters mixed per row", str(quality.top_k)
    yield "threshold", f"{quality.threshold:g}"


def _transfer(evaluation: Evaluation) -> Html | None:
    drawn = transfer(evaluation)
    if drawn is None:
        return None
    note = (
        "Each task's score with all of its rows under one adapter: what a wrong choice costs. The redder, "
        "the more of the score is gone."
    )
    return section("Under another task's adapter", drawn, tag("p", note, class_="note"), anchor="transfer")


def _shown(evaluation: Evaluation) -> Html | None:
    if not evaluation.shown:
        return None
    note = "The first rows of each task as they stand in its data; long texts are cut."
    rows = [_shown_row(row) for row in evaluation.shown]
    return section("What it answers", tag("p", note, class_="note"), *rows, anchor="answers")


def _shown_row(row: ShownRow) -> Html:
    asked = [tag("p", tag("b", f"{name} "), _cut(value)) for name, value in row.fields.items()]
    by_text: dict[str, list[str]] = {}
    for routing, text in row.answers.items():
        by_text.setdefault(text, []).append(routing)
    said = [
        tag("p", tag("b", f"{', '.join(routings)} "), _cut(text) or "(nothing)")
        for text, routings in by_text.items()
    ]
    to = "" if row.adapter is None else f" → {row.adapter}"
    sure = "" if row.confidence is None else f", confidence {row.confidence:.2f}"
    return tag(
        "div", tag("h3", f"{row.task}{to}{sure}"), tag("div", *asked), tag("div", *said), class_="answer"
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " …"


# Learning


def _learning(report: RunReport) -> Iterator[Html]:
    for phase, title in PHASES.items():
        records = [record for record in report.records if record.phase == phase]
        tasks = _tasks_of(records, report.evaluation)
        panels = [*_task_panels(records, tasks, report.evaluation), *_router_panels(records)]
        if panels:
            yield section(f"{title}: learning", tag("div", *panels, class_="panels"), anchor=phase)


def _tasks_of(records: Sequence[StepRecord], evaluation: Evaluation | None) -> list[str]:
    """The tasks that the log speaks of, in the order of their adapters where that is known."""
    spoken_of = dict.fromkeys(
        name
        for record in records
        for name in (*record.validation, *record.losses)
        if name not in (*ROUTER_TERMS, "total")
    )
    order = () if evaluation is None else evaluation.tasks
    return [*(task for task in order if task in spoken_of), *(t for t in spoken_of if t not in order)]


def _task_panels(
    records: Sequence[StepRecord], tasks: Sequence[str], evaluation: Evaluation | None
) -> Iterator[Html]:
    for task in tasks:
        lines = [
            loss_line(records, task, name="loss"),
            validation_line(records, task, "loss", name="held out"),
        ]
        drawn = [curve(lines)]
        metric = _metric(records, task, evaluation)
        if metric is not None:
            drawn.append(curve([validation_line(records, task, metric, name=metric, colour="third")]))
        yield from _panel(task, drawn)


def _metric(records: Sequence[StepRecord], task: str, evaluation: Evaluation | None) -> str | None:
    """The score that stands for the task; without an evaluation, the first in the log."""
    if evaluation is not None and task in evaluation.metrics:
        return evaluation.metrics[task]
    names = (name for record in records for name in record.validation.get(task, {}) if name != "loss")
    return next(names, None)


def _router_panels(records: Sequence[StepRecord]) -> Iterator[Html]:
    figures = dict.fromkeys(name for record in records for name in record.routing)
    for name in figures:
        yield from _panel(
            f"routing: {name}", [curve([routing_line(records, name, name=name, colour="third")])]
        )
    for term in ROUTER_TERMS:
        line: Line = loss_line(records, term, name=term)
        yield from _panel(f"loss: {term}", [curve([line])])


def _panel(title: str, drawn: Sequence[Html | None]) -> Iterator[Html]:
    shown = [each for each in drawn if each is not None]
    if shown:
        yield tag("div", tag("h3", title), *shown)


def _notes(report: RunReport) -> Html | None:
    notes = (*report.notes, *(report.evaluation.notes if report.evaluation else ()))
    return section("Notes", tag("ul", *(tag("li", note) for note in notes))) if notes else None


def _footer(report: RunReport) -> Html:
    pairs = [("run", report.name), ("flatout", __version__)]
    if report.evaluation is not None and report.evaluation.elapsed_s is not None:
        pairs.insert(1, ("evaluation took", show_seconds(report.evaluation.elapsed_s)))
    return tag("footer", facts(pairs))
