"""The page as text: complete, self-contained, and deaf to what a job's strings try."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from flatout.doctor.finding import Finding
from flatout.doctor.report.page import _kernels, _loader, _memory, _ranks, _what_it_ran_on, page
from flatout.measure.evidence import Evidence
from flatout.page.document import POLICY
from flatout.page.markup import VOID
from tests.support import doctor as builders

LOADING = {"src", "srcset", "data", "action", "poster", "background", "xlink:href"}


class Reader(HTMLParser):
    """What a browser would see: the elements, balanced, and the text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


def read(evidence: Evidence, findings: tuple[Finding, ...]) -> Reader:
    reader = Reader()
    reader.feed(page(evidence, findings))
    reader.close()
    assert reader.open == []
    reader.text = " ".join(reader.text.split())
    return reader


CASES = {
    "gpu": (builders.evidence(), builders.findings()),
    "map": (builders.with_map(), builders.findings()),
    "ranks": (builders.evidence(ranks=builders.ranks()), builders.findings()),
    "cpu": (builders.cpu_evidence(), ()),
    "bare": (builders.bare_evidence(), ()),
    "hostile": (builders.hostile_evidence(), builders.hostile_findings()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_balanced_and_asks_nothing_of_any_host(case: str) -> None:
    seen = read(*CASES[case])
    names = {name for name, _ in seen.elements}
    assert not names & {"script", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    for name, attributes in seen.elements:
        assert not LOADING & attributes.keys(), name
        assert not [key for key in attributes if key.startswith("on")], name
        if "href" in attributes:
            assert (attributes["href"] or "").startswith(("#finding-", "data:,"))
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in seen.elements


def test_the_style_sheet_loads_nothing() -> None:
    style = page(builders.evidence(), ()).partition("<style>")[2].partition("</style>")[0]
    assert len(style) > 1000
    for word in ("url(", "@import", "@font-face", "</"):
        assert word not in style
    for word in ("color-scheme: light dark", "light-dark(", "@media print", "max-width"):
        assert word in style


def test_every_part_of_a_full_diagnosis_is_there() -> None:
    text = read(builders.evidence(ranks=builders.ranks()), builders.findings()).text
    for words in (
        "darkroom/train.py --batch-size 512",
        "The host limits the step: the GPU is busy for 12 % of it",
        "Where the time of a step goes",
        "GPU stream",
        "on cached batches 1.04× [1.02, 1.07] measured the loader costs 4 % of the step",
        "Every step",
        "Cut off: step 0, 64.5 s.",
        "Loader of HistoryDataset",
        "Kernels",
        "Memory",
        "Rank 1 on node-b is the straggler",
        "worker memory: psutil could not read /proc of worker 1",
    ):
        assert words in text, words


def test_findings_are_listed_and_explained_in_order() -> None:
    seen = read(builders.evidence(), builders.findings())
    anchors = [attributes["id"] for name, attributes in seen.elements if name == "article"]
    links = [(attributes["href"] or "")[1:] for name, attributes in seen.elements if name == "a"]
    assert anchors == links == ["finding-1", "finding-2", "finding-3", "finding-4"]
    for finding in builders.findings():
        for words in (finding.code, finding.name, finding.message, finding.fix, *finding.evidence):
            assert words in seen.text


def test_the_guilty_line_is_marked_among_its_neighbours() -> None:
    html = page(builders.evidence(), builders.findings()[:1])
    source = html.partition('class="source scroll"')[2].partition("</div>")[0]
    assert source.count('class="guilty"') == 1
    guilty = source.partition('class="guilty"')[2].partition("</tr>")[0]
    assert ">61</th>" in guilty
    assert "rows.append(token" in guilty
    for line in (57, 58, 59, 60, 62):
        assert f">{line}</th>" in source
    assert ">56</th>" not in source


def test_an_excerpt_loses_the_indentation_its_lines_share() -> None:
    html = page(builders.evidence(), builders.findings()[:1])
    assert "<td>for i in range(states.shape[0]):</td>" in html
    assert "<td>    kind = torch.tensor(" in html


def test_a_finding_without_source_or_place_is_shown_without_an_excerpt() -> None:
    html = page(builders.evidence(sources={}), builders.findings())
    assert 'class="guilty"' not in html
    assert "FO302" in html


def test_without_findings_the_page_says_what_was_checked() -> None:
    text = read(builders.cpu_evidence(), ()).text
    assert "None." in text
    assert "Checked: 9 timed steps, the loader" in text


def test_a_job_without_steps_has_no_drawings_and_says_why() -> None:
    seen = read(builders.bare_evidence(), ())
    assert not [name for name, _ in seen.elements if name == "svg"]
    assert "No step was measured." in seen.text
    assert "The job crashed before the diagnosis was complete: ValueError: no data" in seen.text


def test_one_counterfactual_and_an_unsplit_step_are_enough() -> None:
    step = dataclasses.replace(builders.steps()[7], phases_s={})
    evidence = builders.evidence(steps=(step,), counterfactuals=builders.counterfactuals()[:1])
    assert "on cached batches" in read(evidence, ()).text


def test_a_job_of_many_steps_keeps_the_page_small() -> None:
    usual = builders.steps()[7]
    many = tuple(dataclasses.replace(usual, index=i, block=i // 500) for i in range(5000))
    html = page(builders.evidence(steps=many), ())
    assert "Each bar is the mean of up to" in html
    assert len(html) < 1.2 * len(page(builders.evidence(steps=many[:250]), ()))


def test_only_the_longest_of_the_steps_that_are_cut_off_are_named() -> None:
    usual, long = builders.steps()[7:27], builders.steps()[:1]
    steps = tuple(dataclasses.replace(step, index=i, block=i) for i, step in enumerate((*usual, *long * 5)))
    text = read(builders.evidence(steps=steps), ()).text
    assert text.count("Cut off: step") == 3
    assert "2 more are cut off." in text


def test_a_page_with_half_characters_can_be_written() -> None:
    page(builders.hostile_evidence(), builders.hostile_findings()).encode("utf-8")


# What was measured


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
    made = _loader(builders.loader())
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
    made = _loader(bare)
    assert "<table>" not in made
    assert fact(made, "wait per batch") == fact(made, "constructed at") == fact(made, "batch size") == "n/a"
    assert "padding" not in made


def test_kernels_are_listed_with_copies() -> None:
    made = _kernels(builders.kernels(), device="cuda")
    assert made is not None
    assert fact(made, "kernels per step") == "231,400"
    assert fact(made, "GPU busy") == "12 %"
    assert cells(made)[0][1:] == ["elementwise", "float32", "96,100", "440 ms"]
    assert cells(made)[-1] == ["copy HtoD pageable", "copy", "22.9 MiB", "1,030", "180 ms"]


def test_on_a_cpu_they_are_operators_and_nothing_is_said_of_a_gpu() -> None:
    made = _kernels(builders.cpu_evidence().kernels, device="cpu")
    assert made is not None
    assert "<h2>Operators</h2>" in made
    assert "GPU" not in made


def test_memory_names_the_holder_and_the_graph() -> None:
    made = _memory(builders.memory())
    assert made is not None
    assert cells(made) == [
        ["darkroom/train.py:55", "history", "darkroom/train.py:55", "2.00 KiB", "4", "yes"],
    ]
    assert "Graph held by history: 58 more nodes every step." in made


def test_ranks_need_company() -> None:
    made = _ranks(builders.evidence(ranks=builders.ranks()))
    assert made is not None
    assert [row[0] for row in cells(made)] == ["0", "1"]
    assert "is the straggler" in made
    assert _ranks(builders.evidence(ranks=builders.ranks()[:1])) is None


def test_what_was_not_taken_has_no_section() -> None:
    assert _kernels(None, device="cuda") is None
    assert _memory(None) is None
    assert "Not measured" not in page(
        dataclasses.replace(builders.evidence(), missing=(), arms_not_run=()), ()
    )
    assert "psutil could not read" in page(builders.evidence(), ()).partition("Not measured")[2]


def test_the_footer_says__what_it_ran_on() -> None:
    made = dict(_what_it_ran_on(builders.evidence()))
    assert made["torch"] == "2.13.0"
    assert made["GPU"] == "NVIDIA H200, 140 GiB"
    assert made["autocast"] == "off"
    assert dict(_what_it_ran_on(builders.cpu_evidence()))["GPU"] == "none"
    assert dict(_what_it_ran_on(builders.bare_evidence()))["cores"] == "n/a"


def test_the_map_lists_blocks_and_draws_their_lines() -> None:
    reader = read(builders.with_map(), ())
    blocks = [f"darkroom/model.py:{lines}" for lines in ("57-62", "60-61")]
    listed = reader.text.partition("What each block of your code costs")[2]
    assert listed.index(blocks[0]) < listed.index(blocks[1]) < listed.index("darkroom/train.py:55")
    assert "200 ms 43.0× [38.7, 47.3]" in listed
    widths = [attributes["style"] for name, attributes in reader.elements if "style" in attributes]
    assert widths.count("width: 97.7%") == 4  # lines of the outer block that the inner one does not hold
    assert widths.count("width: 88.4%") == 2
    assert "What each block of your code costs" not in page(builders.evidence(), ())


def test_a_finding_shows_its_fix_before_and_after() -> None:
    text = page(builders.evidence(), builders.findings())
    removed = text.index('class="removed"')
    assert removed < text.index('class="added"')
    assert "FO302: an example of the fix, before and after" in text
