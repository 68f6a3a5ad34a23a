"""A run of adapters as one HTML page.

It answers, in this order: what does the router cost against a perfect one, what are the adapters worth, where
do rows go wrong, can its confidence be believed, and how did it all learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout import __version__
from flatout.engines.adapters.evaluation.results import (
    ROUTINGS,
    Evaluation,
    RoutingName,
    RoutingQuality,
    ShownRow,
)
from flatout.engines.adapters.report.charts import (
    confidence_bars,
    confusion,
    draw_learning,
    load_bars,
    loss_line,
    reliability,
    routing_line,
    score_dots,
    show_exact_share,
    show_points,
    transfer,
    validation_line,
)
from flatout.engines.adapters.report.run_report import RunReport, headline
from flatout.engines.adapters.training.records import StepRecord
from flatout.ground.units import show, show_seconds, show_share
from flatout.page.charts import Curve
from flatout.page.document import document
from flatout.page.inline import inline
from flatout.page.markup import Html, facts, known, listing, section, table, tag
from flatout.page.printable import shorten

LONGEST_TEXT, LONGEST_NAME = 320, 60
MOST_CLASSES = 40
ROUTER_TERMS = ("router", "confidence", "balance", "efficiency", "consistency", "entropy", "temperature")
MEANS: tuple[RoutingName, ...] = ("oracle", "routed", "end-to-end")
PHASES = {"phase1": "Adapters", "phase2": "The router", "phase3": "Both together"}


def page(report: RunReport) -> str:
    """Write the whole document."""
    found = report.evaluation
    evaluated = (
        ()
        if found is None
        else (_scores(found), *_classes(found), *_routing(found), _transfer(found), _shown(found))
    )
    notes = (*report.notes, *(found.notes if found else ()))
    return document(
        report.name,
        (*evaluated, *_learning(report), listing("Notes", notes)),
        kind="Report of an adapters run",
        where=(report.model, report.device),
        verdict=headline(report),
        figures=() if found is None else _figures(found),
        footer=(
            ("run", report.name),
            ("evaluation took", known(found.elapsed_s if found else None, show_seconds)),
            ("flatout", __version__),
        ),
        version=__version__,
    )


def _figures(found: Evaluation) -> Iterator[tuple[str, str | None]]:
    yield "tasks", str(len(found.tasks))
    yield f"{found.split} rows", f"{sum(found.num_rows.values()):,}"
    yield "routed correctly", known(found.routing, lambda routing: show_exact_share(routing.accuracy_share))
    for routing in MEANS:
        yield f"mean, {routing}", known(found.mean(routing), show_points)
    better = [
        oracle > heads
        for task in found.tasks
        if (heads := found.heads_only_score(task)) is not None
        and (oracle := found.score(task, "oracle")) is not None
    ]
    yield "adapters beat heads-only", f"{sum(better)} of {len(better)}" if better else None


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
        f"Points, 100 at best, on {evaluation.split} rows. Oracle: every row under its own task's adapter. "
        "Routed: under what the router chose. Uniform: all adapters with equal weights. Random: an adapter "
        "drawn per row. In all of these the row's own head answers; end-to-end, rows that the router took "
        "for another task's count as not answered."
    )
    if evaluation.best_single is not None:
        note += f" Single: all rows under the adapter of {evaluation.best_single}, the best on average."
    if evaluation.heads_only is not None:
        note += " Heads-only: a run that left the encoder unchanged and trained only heads."
    return section(
        "Scores",
        inline(score_dots(evaluation)),
        table(heads, rows, numbers=range(2, len(heads))),
        tag("p", note, class_="note"),
        _all_scores(evaluation),
        anchor="scores",
    )


def _all_scores(evaluation: Evaluation) -> Html:
    """List every score of every task, folded away."""
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


def _classes(evaluation: Evaluation) -> Iterator[Html]:
    """Yield the classes of each task that has classes, worst first."""
    for task, scores in evaluation.classes.items():
        worst = sorted(scores.items(), key=lambda item: item[1].f1)
        rows = [(name, f"{each.num_rows:,}", show_points(each.f1)) for name, each in worst[:MOST_CLASSES]]
        left = len(worst) - len(rows)
        yield section(
            f"Classes of {shorten(task, LONGEST_NAME)}",
            table(("class", "rows", "F1"), rows, numbers=(1, 2)),
            note="Under the task's own adapter." + (f" {left} better ones are not shown." if left else ""),
            anchor=f"classes-{list(evaluation.classes).index(task)}",
        )


# Routing


def _routing(evaluation: Evaluation) -> Iterator[Html]:
    quality = evaluation.routing
    if quality is None:
        return
    note = "Shares of each task's rows by the adapter chosen first. On the diagonal the choice is correct."
    by_task = ", ".join(
        f"{task} {show_exact_share(share)}" for task, share in quality.accuracy_by_task.items()
    )
    yield section(
        "Where rows go",
        inline(confusion(quality, evaluation.tasks)),
        note=f"Correct by task: {by_task}. {note}",
        anchor="confusion",
    )
    yield section(
        "Can its confidence be trusted?",
        tag("div", inline(confidence_bars(quality)), inline(reliability(quality)), class_="panels"),
        note=_confidence_note(quality),
        anchor="confidence",
    )
    yield section(
        "Load and entropy", inline(load_bars(quality)), facts(_routing_facts(quality)), anchor="load"
    )


def _confidence_note(quality: RoutingQuality) -> str:
    words = (
        "Left: rows by the confidence of their routing. Right: the share of rows routed correctly at each "
        "confidence; a larger dot is more rows, and on the dashed line confidence equals that share. "
        f"Mean distance from the line: {show_share(quality.calibration_error)}."
    )
    if quality.threshold > 0:
        below = "its best adapter alone" if quality.fallback == "best" else "all adapters with equal weights"
        words += (
            f" At a threshold of {quality.threshold:g}, {show_share(quality.sure_share)} of the rows are "
            f"sure, and {show_exact_share(quality.sure_accuracy_share)} of those are correct; "
            f"any other row gets {below}."
        )
    return words


def _routing_facts(quality: RoutingQuality) -> Iterator[tuple[str, str]]:
    yield "entropy of a row", f"{quality.entropy_nats:.3f} nats"
    yield "balance of use (1 is even)", show(quality.balance, "{:.3f}")
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
    return section("Under another task's adapter", inline(drawn), note=note, anchor="transfer")


def _shown(evaluation: Evaluation) -> Html | None:
    if not evaluation.shown:
        return None
    note = "The first rows of each task in its data; long texts are cut."
    rows = [_shown_row(row) for row in evaluation.shown]
    return section("What it answers", tag("p", note, class_="note"), *rows, anchor="answers")


def _shown_row(row: ShownRow) -> Html:
    asked = [
        tag("p", tag("b", f"{name} "), shorten(value, LONGEST_TEXT)) for name, value in row.fields.items()
    ]
    by_text: dict[str, list[str]] = {}
    for routing, text in row.answers.items():
        by_text.setdefault(text, []).append(routing)
    said = [
        tag("p", tag("b", f"{', '.join(routings)} "), shorten(text, LONGEST_TEXT) or "(nothing)")
        for text, routings in by_text.items()
    ]
    to = "" if row.adapter is None else f" → {row.adapter}"
    sure = "" if row.confidence is None else f", confidence {row.confidence:.2f}"
    return tag(
        "div",
        tag("h3", f"{row.task}{to}{sure}", class_="whole"),
        tag("div", *asked),
        tag("div", *said),
        class_="sample",
    )


# Learning


def _learning(report: RunReport) -> Iterator[Html]:
    for phase, title in PHASES.items():
        panels = [*_task_panels(report, phase), *_router_panels(report.of_phase(phase))]
        if panels:
            yield section(f"{title}: learning", tag("div", *panels, class_="panels"), anchor=phase)


def _task_panels(report: RunReport, phase: str) -> Iterator[Html]:
    records = report.of_phase(phase)
    spoken_of = dict.fromkeys(
        name
        for record in records
        for name in (*record.validation, *record.losses)
        if name not in (*ROUTER_TERMS, "total")
    )
    # In the order of their adapters, where that is known.
    order = () if report.evaluation is None else report.evaluation.tasks
    for task in (*(t for t in order if t in spoken_of), *(t for t in spoken_of if t not in order)):
        held_out = validation_line(records, task, "loss", name="held out")
        metric = report.metric(task, records) or "score"
        score = validation_line(records, task, metric, name=metric, colour="backward")
        yield from _panel(task, [loss_line(records, task, name="loss"), held_out], [score])


def _router_panels(records: Sequence[StepRecord]) -> Iterator[Html]:
    for name in dict.fromkeys(name for record in records for name in record.routing):
        yield from _panel(f"routing: {name}", [routing_line(records, name, colour="backward")])
    for term in ROUTER_TERMS:
        yield from _panel(f"loss: {term}", [loss_line(records, term)])


def _panel(title: str, *charts: Sequence[Curve]) -> Iterator[Html]:
    shown = [inline(chart) for lines in charts if (chart := draw_learning(lines)) is not None]
    if shown:
        yield tag("div", tag("h3", title), *shown)
