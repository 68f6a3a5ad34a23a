"""The end of the page: tables of what was measured, left out where it was not."""

from __future__ import annotations

import dataclasses
import re

from flatout.doctor.appendix import (
    kernels_section,
    loader_section,
    memory_section,
    ranks_section,
    what_it_ran_on,
)
from flatout.doctor.page import page
from tests.support import doctor as builders


def cells(html: str) -> list[list[str]]:
    """The body rows of a table as text."""
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    return [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows
    ]


def fact(html: str, name: str) -> str:
    found = re.search(rf"<dt>{re.escape(name)}</dt><dd>(.*?)</dd>", html)
    assert found is not None, name
    return found[1]


def test_the_loader_shows_waits_and_each_worker() -> None:
    made = loader_section(builders.loader())
    assert "Loader of HistoryDataset" in made
    assert fact(made, "wait per batch") == "360 ms (p95 410 ms)"
    assert fact(made, "padding") == "29 %"
    assert fact(made, "costliest epoch start") == "1.52 s"
    assert cells(made) == [
        ["0", "15", "300 ms", "310 ms", "2.10 ms"],
        ["1", "15", "300 ms", "320 ms", "1.90 ms"],
    ]


def test_a_loader_without_workers_or_timings_is_not_zero() -> None:
    bare = dataclasses.replace(
        builders.loader(), workers=(), wait_s=None, place=None, batch_size=None, lengths=None, epochs=()
    )
    made = loader_section(bare)
    assert "<table>" not in made
    assert fact(made, "wait per batch") == fact(made, "constructed at") == fact(made, "batch size") == "n/a"
    assert "padding" not in made


def test_kernels_are_listed_with_copies() -> None:
    made = kernels_section(builders.kernels(), device="cuda")
    assert made is not None
    assert fact(made, "kernels per step") == "231,400"
    assert fact(made, "GPU busy") == "12 %"
    assert cells(made)[0][1:] == ["elementwise", "float32", "96,100", "440 ms"]
    assert cells(made)[-1] == ["copy HtoD pageable", "copy", "22.9 MiB", "1,030", "180 ms"]


def test_on_a_cpu_they_are_operators_and_nothing_is_said_of_a_gpu() -> None:
    made = kernels_section(builders.cpu_evidence().kernels, device="cpu")
    assert made is not None
    assert "<h2>Operators</h2>" in made
    assert "GPU" not in made


def test_memory_names_the_holder_and_the_graph() -> None:
    made = memory_section(builders.memory())
    assert made is not None
    assert cells(made) == [
        ["darkroom/train.py:55", "history", "darkroom/train.py:55", "2.00 KiB", "4", "yes"],
    ]
    assert "Graph held by history: 58 more nodes every step." in made


def test_ranks_need_company() -> None:
    made = ranks_section(builders.evidence(ranks=builders.ranks()))
    assert made is not None
    assert [row[0] for row in cells(made)] == ["0", "1"]
    assert "Rank 1 is the straggler" in made
    assert ranks_section(builders.evidence(ranks=builders.ranks()[:1])) is None


def test_what_was_not_taken_has_no_section() -> None:
    assert kernels_section(None, device="cuda") is None
    assert memory_section(None) is None
    assert "Not measured" not in page(dataclasses.replace(builders.evidence(), missing=()), ())
    assert "psutil could not read" in page(builders.evidence(), ()).partition("Not measured")[2]


def test_the_footer_says_what_it_ran_on() -> None:
    made = dict(what_it_ran_on(builders.evidence()))
    assert made["torch"] == "2.13.0"
    assert made["GPU"] == "NVIDIA H200, 140 GiB"
    assert made["autocast"] == "off"
    assert dict(what_it_ran_on(builders.cpu_evidence()))["GPU"] == "none"
    assert dict(what_it_ran_on(builders.bare_evidence()))["cores"] == "n/a"
