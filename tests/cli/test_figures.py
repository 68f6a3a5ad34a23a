"""Every figure of the README and the docs is what its result file says.

A figure is a decimal number, or a number with a unit (28 times, 99 %, 75 seconds), outside code.  Behind its
paragraph stands where it comes from, in a comment that no reader sees:

    <!-- figures
    28.4 times = benchmarks/adapters/results/adapters-minilm_….json: shapes / 0 / sizes / tokens=2048 / ratio
    0.95, 0.97 = chosen
    -->

A path goes through keys, the numbers of a list and `key=value` of its rows; `÷` divides two of them,
`minus` subtracts, `× 100` scales. A plain integer (9,610) is compared where a source names it. `chosen` is
a setting, a goal or an example. Not compared here: `follows from FILE`, which needs many of its rows;
`computed by FILE`, what a script prints or another test checks; and `measured by hand`, which only the page
of decisions about libraries may say.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
UNITS = r"×|%|ms\b|µs\b|s\b|[KMGT]i?B\b|times\b|seconds\b|minutes\b|hours\b"
FIGURE = re.compile(rf"(?<![\w.,/-])\d(?:[\d,]*\d)?(?:\.\d+)?(?:\s?(?:{UNITS})|(?!\.?\w))")
INTEGER = re.compile(r"\d[\d,]*")
VERSION = re.compile(r"\b(?:Python|torch|PyTorch|Hydra|Textual|CUDA|Qwen|arXiv) \d[\d.]*\d")
SOURCES = re.compile(r"<!-- figures\n(.*?)\n-->", re.DOTALL)
BY_HAND = {"decisions.md"}


def figures_of(text: str) -> list[str]:
    """List the figures of a paragraph: numbers with a unit, and decimal numbers."""
    found = [re.sub(r"\s+", " ", match) for match in FIGURE.findall(VERSION.sub("", text))]
    return [one for one in found if "." in one or not re.fullmatch(r"[\d,]+", one)]


def has_integer(text: str, label: str) -> bool:
    return re.search(rf"(?<![\d.,]){label}(?![\d]|[.,]\d)", text) is not None


def prose_of(page: str) -> str:
    """Return a page without code, links' targets, and tables that are written from result files."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!-- (\w+): \w+ -->.*?<!-- /\1 -->", "", page, flags=re.DOTALL)
    page = re.sub(
        r"(?m)^ {4}.*$|^\| \d+\.\d+ \|", "", page
    )  # examples; the numbers of rows of the coverage page
    return re.sub(r"`[^`\n]+`|\]\([^)]*\)|https?://\S+", "", page)


def paragraphs(page: str) -> list[tuple[str, str]]:
    """Pair each paragraph with the sources behind it."""
    parts = re.split(r"\n\s*\n", prose_of(page))
    found: list[tuple[str, str]] = []
    for part in parts:
        sources = "\n".join(SOURCES.findall(part))
        text = SOURCES.sub("", part)
        if sources and not text.strip() and found:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{sources}".strip())
        else:
            found.append((text, sources))
    return found


def look_up(document: Any, path: str) -> float:
    """Follow a path to its number."""
    for key in path.split(" / "):
        name, equals, value = key.partition("=")
        if isinstance(document, list) and equals:
            (document,) = [row for row in document if str(row.get(name)) == value]
        else:
            document = document[int(key) if isinstance(document, list) else key]
    assert isinstance(document, (int, float)), path
    return float(document)


def value_of(source: str) -> float:
    """Compute what `FILE: PATH ÷ PATH minus PATH × 100` names."""
    file, _, expression = source.partition(": ")
    document = json.loads((ROOT / file).read_text(encoding="utf-8"))
    expression, _, factor = expression.partition(" × ")
    terms = []
    for term in expression.split(" minus "):
        value, *divisors = (look_up(document, path) for path in term.split(" ÷ "))
        terms.append(value / math.prod(divisors))
    return (terms[0] - sum(terms[1:])) * float(factor or 1)


def agrees(figure: str, value: float) -> bool:
    """Whether a figure is the value, rounded to the digits it shows."""
    number = re.match(r"[\d,.]+", figure)
    assert number is not None
    shown = number[0].rstrip(".").replace(",", "")
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-digits + 1e-9


def wrong_with(figure: str, source: str | None, *, page: str) -> str | None:
    """Say what is wrong with a figure's source."""
    if source is None:
        return "has no source"
    if source == "chosen":
        return None
    if source == "measured by hand":
        return None if page in BY_HAND else "was measured without a result file"
    if found := re.fullmatch(r"(?:computed by|follows from) (\S+)", source):
        if not (ROOT / found[1]).is_file():
            return f"names no file: {source}"
        computes = source.startswith("follows") or found[1].endswith(".py")
        return None if computes else f"is computed by a file that computes nothing: {source}"
    value = value_of(source)
    return None if agrees(figure, value) else f"is {value:.6g} in {source}"


def wrong_figures(text: str, sources: str, *, page: str) -> list[str]:
    named: dict[str, str] = {}
    for line in filter(None, sources.split("\n")):
        labels, _, source = line.partition(" = ")
        named |= dict.fromkeys(labels.split("; "), source.strip())
    figures = figures_of(text)
    figures += [label for label in named if INTEGER.fullmatch(label) and has_integer(text, label)]
    everything = named.get("all")
    wrong = [
        f"{figure!r} {said}"
        for figure in figures
        if (said := wrong_with(figure, named.get(figure, everything), page=page)) is not None
    ]
    return wrong + [f"{label!r} is not in the text" for label in named if label not in {*figures, "all"}]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_figure_is_what_its_source_says(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    wrong = [
        one for text, sources in paragraphs(page) for one in wrong_figures(text, sources, page=path.name)
    ]
    assert not wrong, "\n".join(wrong)


def test_pages_have_figures_that_were_compared() -> None:
    sources = [
        line for path in PAGES for block in SOURCES.findall(path.read_text()) for line in block.split("\n")
    ]
    assert sum(": " in line for line in sources) >= 30


@pytest.mark.parametrize(
    ("text", "sources", "said"),
    [
        ("It is 28.4 times as fast.", "", "'28.4 times' has no source"),
        ("0.95 of it", "0.95 = measured by hand", "'0.95' was measured without a result file"),
        ("5 of 7 rows in 1.5B shapes with Python 3.11", "", None),
        ("a goal of 3 %", "3 % = chosen", None),
        ("none", "3 % = chosen", "'3 %' is not in the text"),
        ("1,234 rows", "1,234 = chosen", None),
        ("1,234 rows", "234 = chosen", "'234' is not in the text"),
        (
            "0.95 of it",
            "0.95 = computed by README.md",
            "'0.95' is computed by a file that computes nothing: ",
        ),
    ],
)
def test_a_figure_without_a_source_is_told(text: str, sources: str, said: str | None) -> None:
    wrong = wrong_figures(text, sources, page="README.md")
    assert len(wrong) == (said is not None)
    assert all(one.startswith(said or "") for one in wrong)


def test_a_figure_is_compared_to_the_digits_it_shows() -> None:
    results = "benchmarks/loading/results/loading_amd-epyc--2-cores_2026-11-15.json"
    source = f"{results}: data / rows / arms / DataLoader"
    assert wrong_figures("42.3 times", f"42.3 times = {source} / ratio", page="README.md") == []
    (said,) = wrong_figures("43 times", f"43 times = {source} / ratio", page="README.md")
    assert said.startswith("'43 times' is 42.2662 in")
    halves = f"{source} / seconds ÷ data / rows / arms / flatout / seconds"
    assert wrong_figures("42 times", f"42 times = {halves}", page="README.md") == []
    less = f"{source} / ratio minus data / rows / arms / DataLoader / ratio"
    assert wrong_figures("0.0 of it", f"0.0 = {less}", page="README.md") == []
    (said,) = wrong_figures("1,000 rows", f"1,000 = {source} / ratio", page="README.md")
    assert said.startswith("'1,000' is 42.2662 in")


def test_tables_in_the_files_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tables = importlib.import_module("tables")
    stale = [
        str(path.relative_to(ROOT))
        for path, text in tables.current().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make tables`"
