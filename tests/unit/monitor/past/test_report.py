"""The page of a run: everything it claims is in it, nothing it was given can run in it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.monitor.past.outline import RunOutline, read_outline
from flatout.monitor.past.report import headline, page
from flatout.monitor.past.summary import summarise
from flatout.monitor.sample import GpuSample, Sample
from flatout.page.document import POLICY, write_page
from flatout.page.markup import escape
from tests.support.monitor import HOSTILE, START_S, kept_run, story


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(html: str) -> Text:
    found = Text()
    found.feed(html)
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunOutline:
    samples = story(seconds=240, wait=0.03, late_wait=0.45)
    return read_outline(kept_run(tmp_path_factory.mktemp("runs"), samples))


def test_everything_is_on_the_page(recorded: RunOutline) -> None:
    text = " ".join(parsed(page(recorded)).words)
    for title in (
        "What bounded it",
        "Steps per second",
        "Loss",
        "Where the time of a step goes",
        "Over time, by the clock of the GPU",
        "How busy",
        "Power",
        "Memory",
        "held by tensors",
        "in use on the device",
        "Energy",
        "Per step",
        "Per sample",
        "GPUs",
    ):
        assert title in text, title
    assert "GPU 0 is the limit" in text and "the loader is too slow" in text
    assert "limit 700 W" in text and "capacity 140 GiB" in text


def test_it_needs_and_runs_nothing(recorded: RunOutline) -> None:
    html = page(recorded)
    assert not {"script", "img", "iframe", "object"} & set(parsed(html).tags)
    assert escape(POLICY) in html and POLICY.startswith("default-src 'none'")
    assert "http://" not in html and "https://" not in html
    assert len(html) < 500_000


def test_hostile_names_are_text(tmp_path: Path) -> None:
    samples = []
    for sample in story(seconds=30, name=HOSTILE):
        gpus = (replace(sample.gpus[0], name=HOSTILE, throttle_reasons=(HOSTILE,)), sample.gpus[1])
        samples.append(replace(sample, gpus=gpus, notes=(HOSTILE,)))
    html = page(read_outline(kept_run(tmp_path, tuple(samples), name=HOSTILE)))
    found = parsed(html)
    assert "script" not in found.tags
    assert any("<script>alert(1)</script>" in words for words in found.words)
    assert not any(char in html for char in "\x1b\x07\u202e")


def test_a_run_without_a_gpu_says_why(tmp_path: Path) -> None:
    recorded = read_outline(kept_run(tmp_path, story(seconds=40, gpus=False)))
    text = " ".join(parsed(page(recorded)).words)
    assert "no NVIDIA driver" in text and "Steps per second" in text
    assert "Power" not in text and "Over time, by the clock of the host" in text


def test_almost_nothing_is_still_a_page(tmp_path: Path) -> None:
    for number, samples in enumerate(
        ((Sample(time_s=START_S),), (Sample(time_s=START_S, gpus=(GpuSample(index=0, lost=True),)),))
    ):
        recorded = read_outline(kept_run(tmp_path, samples, pid=number + 1))
        assert "is not known" in " ".join(parsed(page(recorded)).words)


def test_the_headline_says_how_much_of_the_run_it_speaks_of(recorded: RunOutline, tmp_path: Path) -> None:
    assert "(in 67 % of the run)" in headline(summarise(recorded))
    healthy = read_outline(kept_run(tmp_path, story(seconds=60)))
    assert headline(summarise(healthy)).endswith("of the step.")


def test_it_is_written_whole_or_not_at_all(recorded: RunOutline, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.html"
    write_page(page(recorded), path)
    assert path.read_text() == page(recorded)
    assert [each.name for each in path.parent.iterdir()] == ["run.html"]
    with pytest.raises(BadInput, match="cannot be written"):
        write_page(page(recorded), path / "inside.html")
