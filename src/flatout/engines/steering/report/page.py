"""A study as one HTML page.

It answers, in this order: did steering work on questions the search never saw, where in the model, what did
it break, and what does it read like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flatout import __version__
from flatout.engines.steering.report.charts import (
    heat_map,
    intervals,
    show_score,
    trade_off,
)
from flatout.engines.steering.report.record import FEWEST, StudyRecord, TrialRecord
from flatout.ground.units import show, show_ratio, show_seconds
from flatout.page.document import document
from flatout.page.inline import inline
from flatout.page.markup import Html, known, listing, section, table, tag
from flatout.page.printable import shorten

MOST_TRIALS = 15
LONGEST_TEXT = 1200


def page(record: StudyRecord) -> str:
    """Write the whole document."""
    difference = known(record.retest, lambda retest: retest.difference.show())
    return document(
        record.name,
        (
            _retest(record),
            _map(record),
            _cost(record),
            _examples(record),
            _trials(record),
            listing("Notes", record.notes),
        ),
        kind="Report of a steering study",
        where=(record.model, record.device),
        verdict=record.headline(),
        figures=_figures(record),
        footer=(
            ("study", record.name),
            ("layers of the model", str(record.num_layers)),
            ("difference on fresh questions", difference),
            ("flatout", __version__),
        ),
        version=__version__,
    )


def _figures(record: StudyRecord) -> Iterator[tuple[str, str | None]]:
    yield "trials", str(len(record.trials))
    for state in ("complete", "pruned", "failed", "running"):
        yield state, str(record.count(state) or "") or None
    yield "unsteered", known(record.baseline_score, show_score)
    yield "best in the search", known(record.winner.score if record.winner else None, show_score)
    yield "perplexity", known(record.perplexity_ratio, lambda ratio: show_ratio(ratio.value))
    yield "search", known(record.search_s, show_seconds)
    done = record.count("complete") + record.count("pruned")
    if record.search_s and done:
        yield "trials per hour", f"{3600 * done / record.search_s:,.0f}"


def _retest(record: StudyRecord) -> Html | None:
    if record.retest is None:
        return None
    drawn = "dots are means, lines 95 % intervals by bootstrap"
    if record.retest.difference.bounds is None:
        drawn = f"dots are means, and fewer than {FEWEST} questions give no interval that can be trusted"
    note = (
        f"{record.score_name[:1].upper()}{record.score_name[1:]} on {record.retest.num_questions} questions "
        f"that the search never saw; {drawn}. The best of many trials looks better in the search than it "
        "is: these are the figures to quote."
    )
    return section("On fresh questions", inline(intervals(record.retest)), note=note, anchor="retest")


def _map(record: StudyRecord) -> Html | None:
    drawn = heat_map(record)
    if drawn is None:
        return None
    chart, reach = drawn
    baseline = record.baseline_score or 0.0
    against = "the unsteered model" if record.baseline_score is not None else "zero"
    key = tag(
        "div",
        show_score(baseline - reach),
        tag("span", class_="ramp"),
        show_score(baseline + reach),
        class_="key",
    )
    note = (
        f"The best {record.score_name} of each cell; colour is the distance from {against} "
        f"({show_score(baseline)}). Pruned trials count with the questions they were asked. Strength is in "
        "units of the layer's mean residual norm. Outlined: the winner."
    )
    return section(
        "Layer and strength",
        inline(chart),
        key,
        note=note,
        anchor="map",
    )


def _cost(record: StudyRecord) -> Html | None:
    drawn = trade_off(record)
    if drawn is None and record.perplexity_ratio is None:
        return None
    parts = [] if drawn is None else [inline(drawn)]
    note = (
        "Across: perplexity of neutral text, steered over unsteered; 1× is unharmed. Up: the score of the "
        "search; dashed, the unsteered model's."
    )
    if record.perplexity_ratio is not None:
        ratio = record.perplexity_ratio
        ends = "" if ratio.bounds is None else ", between {:.3g}× and {:.3g}×".format(*ratio.bounds)
        parts.append(tag("p", f"The winner: {ratio.value:.3g}×{ends}."))
    return section("What it costs", *parts, note=note if drawn is not None else "", anchor="cost")


def _examples(record: StudyRecord) -> Html | None:
    if not record.examples:
        return None
    shown = [
        tag(
            "div",
            tag("div", *_lines(example.prompt), class_="whole"),
            tag("div", tag("h3", "unsteered"), *_lines(example.unsteered)),
            tag("div", tag("h3", "steered"), *_lines(example.steered)),
            class_="sample",
        )
        for example in record.examples
    ]
    return section("What it reads like", *shown, anchor="examples")


def _lines(text: str) -> list[Html]:
    """Split a text into paragraphs, cut where it is long."""
    return [tag("p", line) for line in shorten(text, LONGEST_TEXT).splitlines() if line.strip()] or [
        tag("p", "(nothing)")
    ]


def _trials(record: StudyRecord) -> Html | None:
    scored = [trial for trial in record.trials if trial.score is not None]
    if not scored:
        return None
    # A trial that was asked few questions may score high by luck: those asked most come first.
    ranked = sorted(scored, key=lambda trial: (-(trial.num_questions or 0), -_score(trial), trial.number))
    heads = (
        "trial",
        "layer",
        "method",
        "mode",
        "strength",
        "where",
        "score",
        "questions",
        "perplexity",
        "state",
    )
    rows = [
        (
            str(trial.number),
            str(trial.layer) if trial.span == 1 else f"{trial.layer} +{trial.span - 1}",
            trial.method,
            trial.mode,
            f"{trial.strength:+.3g}",
            trial.where,
            show_score(_score(trial)),
            show(trial.num_questions),
            show_ratio(trial.perplexity_ratio),
            trial.state,
        )
        for trial in ranked[:MOST_TRIALS]
    ]
    note = f"{len(rows)} of {len(record.trials)} trials, those asked the most questions first."
    listed = table(heads, rows, numbers=(0, 1, 4, 6, 7, 8))
    return section("The best trials", listed, note=note, anchor="trials")


def _score(trial: TrialRecord) -> float:
    return -math.inf if trial.score is None else trial.score
