"""The monitor's page in a real browser: it moves, comes back, and stays harmless, light, dark and small.

FLATOUT_PICTURES=1 takes the pictures of docs/images, of runs that are made up; in the place of the 1 stand
the folders of real ones, with a colon between them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.runs import end_run, read_run, write_run
from flatout.monitor.fleet.nodes import Fleet
from flatout.monitor.sample import HostSample, Sample
from flatout.monitor.sampler import Sampler
from flatout.monitor.web.server import PageServer
from tests.support.browser import OVERFLOW, Opened, Pages, browser, open_pages, playwright
from tests.support.monitor_web import HOSTILE, START_S, logged_run, sample

pytest.importorskip("starlette", reason="starlette is not installed: flatout[web]")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: flatout[web]")

__all__ = ["browser", "open_pages"]

PICTURES = "FLATOUT_PICTURES"
TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
# Going down through the canvas, the first pixel that is strongly coloured, as only lines are.
FIND_LINE = """(chart) => {
  const canvas = document.querySelector(`[data-chart=${chart}] canvas`);
  const column = Math.round(canvas.width * 0.7);
  const pixels = canvas.getContext("2d").getImageData(column, 0, 1, canvas.height).data;
  for (let y = 0; y < canvas.height; y += 1) {
    const [red, , blue, alpha] = pixels.slice(4 * y, 4 * y + 4);
    if (alpha > 200 && Math.abs(blue - red) > 60) return y / canvas.height;
  }
  return NaN;
}"""
# The share of the height of the chart that is coloured, at its left, in its middle and at its right.
BAND = """[0.3, 0.6, 0.9].map((place) => {
  const canvas = document.querySelector("[data-chart=utilisation] canvas");
  const column = Math.round(canvas.width * place);
  const pixels = canvas.getContext("2d").getImageData(column, 0, 1, canvas.height).data;
  let coloured = 0;
  for (let y = 0; y < canvas.height; y += 1) {
    const [red, , blue, alpha] = pixels.slice(4 * y, 4 * y + 4);
    if (alpha > 20 && blue - red > 40) coloured += 1;
  }
  return coloured / canvas.height;
})"""
STORE = """import("./static/store.js").then(({ Store }) => {
  const store = new Store();
  const block = (times, values, is_whole) => ({
    is_whole, start_s: times[0] ?? 0, at_s: times.map((t) => t - times[0]),
    columns: { "host/cpu_share": values }, notes: [], sample: null, verdicts: [],
  });
  const push = (time_s, cpu_share) =>
    store.takeSample({ sample: { time_s, span_s: 1, host: { cpu_share } }, verdicts: [] });
  const kept = () => [[...store.times], [...store.columns.get("host/cpu_share")]];
  store.takeHistory(block([1, 2, 3], [0.1, 0.2, 0.3], true));
  store.takeHistory(block([2, 3, 4], [0.5, 0.6, 0.7], false));
  const overlapped = kept();
  push(5, 0.8);
  push(60, 0.9);
  const holed = kept();
  for (let t = 61; t < 9000; t += 1) push(t, 0.5);
  return { overlapped, holed, long: kept() };
})"""


class WatchPage(Opened):
    """The monitor's page in the browser."""

    def text(self, selector: str) -> str:
        return str(self.browser_page.locator(selector).first.inner_text())

    def has(self, selector: str, text: str) -> None:
        """Wait until an element shows that text."""
        playwright.expect(self.browser_page.locator(selector).first).to_contain_text(text)

    def rows(self, number: int, *, run: int = 0) -> None:
        """Wait until the charts of a run have so many rows."""
        node = self.browser_page.locator("section.run").nth(run)
        playwright.expect(node).to_have_attribute("data-rows", str(number))

    def picture(self, chart: str) -> str:
        return str(self.evaluate(f"document.querySelector('[data-chart={chart}] canvas').toDataURL()"))

    def height(self, chart: str) -> float:
        """Where the line of a chart is, from 0 at its upper edge to 1."""
        return float(self.browser_page.evaluate(FIND_LINE, chart))


Show = Callable[..., WatchPage]


@pytest.fixture
def show(open_pages: Pages) -> Iterator[Show]:
    def open_page(url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> WatchPage:
        opened = open_pages.open(WatchPage, url, width=width, height=height, scheme=scheme)
        opened.browser_page.wait_for_selector("#runs:not([aria-busy]) section.run:not(.waiting)")
        return opened

    yield open_page
    open_pages.leave()


def fed(server: PageServer, seconds: range, make: Callable[[float], Sample] = sample) -> None:
    for second in seconds:
        server.feed.hear(make(second))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[PageServer]:
    """The page of a sampler that the test plays."""
    with PageServer(sampler=Sampler(), root=tmp_path) as server:
        fed(server, range(60))
        yield server


# Live


def test_charts_figures_and_tables_move(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    charts = ("utilisation", "sm", "memory", "power", "rate", "loss", "cpu", "ram")
    before = {chart: opened.picture(chart) for chart in charts}
    steps = opened.text(".facts div:first-child dd")
    fed(live, range(60, 75), lambda second: sample(second, busy=0.9))
    opened.rows(75)
    opened.has(".facts div:first-child dd", "444")
    assert steps == "354"
    assert [chart for chart in charts if opened.picture(chart) == before[chart]] == []
    shown = opened.text("[data-chart=utilisation] .value b")
    assert shown == opened.text(".gpus td[data-column=Utilisation] span")
    assert opened.complaints == []


def test_the_first_chart_is_drawn_where_its_figures_are(show: Show, tmp_path: Path) -> None:
    """A GPU at 100 % is drawn at the top and one at 0 % at the bottom, in the colour of its line."""

    def busy(share: float) -> Callable[[float], Sample]:
        def make(second: float) -> Sample:
            one = sample(second)
            return replace(one, gpus=(replace(one.gpus[0], utilisation_share=share),))

        return make

    heights = []
    for share in (0.9, 0.1):
        with PageServer(sampler=Sampler(), root=tmp_path) as server:
            fed(server, range(60), busy(share))
            opened = show(server.url)
            opened.rows(60)
            heights.append(opened.height("utilisation"))
    assert heights[0] < 0.3
    assert heights[1] > 0.6


def test_it_comes_back_when_the_server_does_and_goes_on(show: Show, tmp_path: Path) -> None:
    with PageServer(sampler=Sampler(), root=tmp_path) as first:
        fed(first, range(60))
        opened = show(first.url)
        opened.rows(60)
        fed(first, range(60, 61))
        opened.rows(61)
        opened.has(".status span", "live")
        port = first.port
    opened.has(".status span", "lost: no answer since")
    with PageServer(sampler=Sampler(), root=tmp_path, port=port) as second:
        # It knows nothing of the time before; the page does.  One row is the gap between.
        fed(second, range(90, 95))
        opened.rows(67)
        fed(second, range(95, 100))
        opened.rows(72)
        opened.has(".status span", "live")
        playwright.expect(opened.browser_page.locator("section.run")).to_have_count(1)


def test_the_verdict_names_what_binds_the_run_and_leads_to_the_rules(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.has(".verdict .bound", "waits for data")
    assert "the loader is too slow" in opened.text(".verdict .sentence").lower()
    assert "flatout diagnose" in opened.text(".verdict .action")
    assert opened.evaluate("document.querySelectorAll('.evidence li').length") >= 2
    opened.browser_page.click(".rules a >> text=FO101")
    opened.has("h1", "FO101 single-process-loading")
    assert opened.evaluate(OVERFLOW) == 0
    opened.browser_page.go_back()
    opened.has(".verdict .bound", "waits for data")
    assert opened.complaints == []


def test_phases_fill_their_bars_by_their_shares(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    shares = opened.evaluate(
        "[...document.querySelectorAll('.phase-bar.host .bar i')].map(i => Number(i.style.flexGrow))"
    )
    assert sum(shares) == pytest.approx(1, abs=0.01)
    widths = opened.evaluate(
        "[...document.querySelectorAll('.phase-bar.host .bar i')].map(i => i.getBoundingClientRect().width)"
    )
    assert widths.index(max(widths)) == shares.index(max(shares))
    assert "wait 3" in opened.browser_page.get_attribute(".phase-bar.host .bar", "aria-label")


def test_nothing_moves_on_the_page_while_figures_change(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    opened.evaluate(
        "new Promise(done => { window.moved = 0; new PerformanceObserver(list => {"
        " for (const entry of list.getEntries()) window.moved += entry.value; })"
        ".observe({type: 'layout-shift', buffered: false});"
        " requestAnimationFrame(() => requestAnimationFrame(done)); })"
    )
    for second in range(60, 100):
        live.feed.hear(sample(second, busy=0.3 + second / 300, wait=0.2 + second / 400))
    opened.rows(100)
    opened.evaluate(TWO_FRAMES)
    assert opened.evaluate("window.moved") < 0.01


def test_a_machine_without_a_gpu_shows_its_host_and_says_why(show: Show, tmp_path: Path) -> None:
    def make(second: float) -> Sample:
        host = HostSample(cpu_share=0.3, memory_used_bytes=2**30, memory_total_bytes=2**34)
        return Sample(time_s=START_S + second, span_s=1.0, host=host, missing={"gpus": "no NVIDIA driver"})

    with PageServer(sampler=Sampler(), root=tmp_path) as server:
        fed(server, range(20), make)
        opened = show(server.url)
        opened.rows(20)
        opened.has(".without", "no NVIDIA driver")
        visible = opened.evaluate(
            "[...document.querySelectorAll('.card')].filter(c => !c.hidden).map(c => c.dataset.chart)"
        )
        assert visible == ["cpu", "ram"]
        assert "30 %" in opened.text("[data-chart=cpu] .value")
        assert opened.complaints == []


# Several runs


@pytest.fixture
def three_runs(tmp_path: Path) -> Iterator[PageServer]:
    logged_run(tmp_path, [sample(second) for second in range(90)], name="slow loader", pid=1)
    fast = [sample(second, busy=0.95, wait=0.02) for second in range(90)]
    logged_run(tmp_path, fast, name="fast loader", pid=2)
    eight = [sample(second, num_gpus=8, busy=0.9, wait=0.02) for second in range(90)]
    logged_run(tmp_path, eight, name="eight", pid=3)
    with PageServer(root=tmp_path) as server:
        yield server


def test_runs_are_found_and_chosen_with_the_keyboard_and_stand_side_by_side(
    show: Show, three_runs: PageServer
) -> None:
    opened = show(three_runs.url)
    page = opened.browser_page
    assert page.locator("section.run").count() == 1
    page.focus("summary")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".search input")).to_be_focused()  # what is typed next is searched for
    names = page.locator(".menu .name")
    assert sorted(names.all_inner_texts()) == ["eight", "fast loader", "slow loader"]
    row = page.locator(".menu tbody tr", has_text="slow loader").inner_text()
    assert "running" in row and "waits for data" in row
    assert re.search(r"\t1\.\d+\t", row), row  # its last loss
    page.fill(".search input", "loader gpu-bound")  # a word of the name, and one of the verdict
    assert names.all_inner_texts() == ["fast loader"]
    page.fill(".search input", "no such run")
    assert page.locator(".menu tbody tr").all_inner_texts() == ["No run has these words."]
    page.fill(".search input", "")
    free = page.locator(".menu .beside", has_text="compare")
    while free.count():
        free.first.focus()
        before = page.locator("section.run").count()
        page.keyboard.press("Space")
        playwright.expect(page.locator("section.run:not(.waiting)")).to_have_count(before + 1)
    page.keyboard.press("Escape")
    assert not opened.evaluate("document.querySelector('.chooser').open")
    assert page.locator("section.run").count() == 3
    assert opened.evaluate(OVERFLOW) == 0
    assert page.locator(".gpus tbody tr").count() == 10
    # The address holds the choice: a reload, or whoever it is sent to, sees the same.
    page.reload()
    playwright.expect(page.locator("section.run:not(.waiting)")).to_have_count(3)
    page.locator(".close").nth(1).click()
    playwright.expect(page.locator("section.run:not(.waiting)")).to_have_count(2)
    tops = opened.evaluate(
        "[...document.querySelectorAll('section.run')].map(s => s.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    # A name alone shows that run alone.
    page.click("summary")
    page.click(".menu .name >> text=slow loader")
    playwright.expect(page.locator("section.run:not(.waiting)")).to_have_count(1)
    opened.has("section.run h2", "slow loader")
    assert opened.complaints == []


def test_two_runs_are_laid_over_each_other_from_their_starts(show: Show, three_runs: PageServer) -> None:
    keys = [key for key in three_runs.feed.run_list.folders if "loader" in key]
    opened = show(f"{three_runs.url}?run={keys[0]}&run={keys[1]}")
    page = opened.browser_page
    page.click("button.overlay")
    legend = page.locator(".over [data-chart=rate] .legend li")
    playwright.expect(legend).to_have_count(2)
    assert sorted(text.split("\n")[0] for text in legend.all_inner_texts())[0].startswith("fast loader")
    assert page.locator(".run .charts").first.is_hidden()
    assert opened.evaluate(OVERFLOW) == 0
    page.click("button.overlay")
    assert page.locator(".run .charts").first.is_visible()
    assert opened.complaints == []


def test_where_there_is_no_run_it_says_what_to_run_and_shows_the_first_that_comes(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.monitor.web.feed.POLL_S", 0.05)
    with PageServer(root=tmp_path) as server:
        page = browser.new_page()
        page.goto(server.url)
        playwright.expect(page.locator(".nothing")).to_contain_text("flatout watch --run train.py")
        assert str(tmp_path) in page.inner_text(".nothing .folder")
        assert page.locator("h1").count() == 1
        logged_run(tmp_path, [sample(second) for second in range(20)], name="first")
        playwright.expect(page.locator("section.run:not(.waiting) h2")).to_contain_text("first")
        assert page.locator(".nothing").count() == 0
        page.close()


def test_the_state_is_that_of_the_run(show: Show, tmp_path: Path) -> None:
    """Ended where the run has ended, though the connection lives; late where a running one is silent."""
    ended = logged_run(tmp_path, [sample(second) for second in range(20)], name="ended", pid=1)
    end_run(ended, time_s=START_S + 20, end="finished", exit_code=0)
    silent = logged_run(tmp_path, [sample(second) for second in range(20)], name="silent")  # years ago
    with PageServer(root=tmp_path) as server:
        show(f"{server.url}?run={ended.name}").has(".status span", "ended")
        show(f"{server.url}?run={silent.name}").has(".status span", "no sample for")


def test_a_long_window_has_slots_of_one_length_with_bands(show: Show, tmp_path: Path) -> None:
    def noisy(second: float) -> Sample:
        one = sample(second, steps_per_s=6.0 if second < 6480 else 3.6)
        return replace(one, gpus=(replace(one.gpus[0], utilisation_share=0.2 + 0.6 * (second // 5 % 2)),))

    folder = logged_run(tmp_path, [noisy(5.0 * number) for number in range(2000)], name="long", pid=1)
    with PageServer(root=tmp_path) as server:
        opened = show(f"{server.url}?run={folder.name}")
        opened.has(".change", "40 % slower since 1:48")
        opened.browser_page.click("label:has([name=range][value=Infinity])")
        opened.evaluate(TWO_FRAMES)
        # From the first slot to the last, the band reaches from the lowest to the highest sample.
        heights = opened.evaluate(BAND)
        assert len(heights) == 3
        assert all(height > 0.4 for height in heights)


def test_the_loss_has_a_logarithmic_scale_and_a_smooth_line(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    seen = {opened.picture("loss")}
    for tool in ("log", "smooth"):
        opened.browser_page.click(f".run [data-tool={tool}]")
        playwright.expect(opened.browser_page.locator(f".run [data-tool={tool}]")).to_have_attribute(
            "aria-pressed", "true"
        )
        opened.evaluate(TWO_FRAMES)
        seen.add(opened.picture("loss"))
    assert len(seen) == 3
    assert opened.complaints == []


def test_a_loss_that_is_lost_is_not_shown_as_what_it_was_before(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    for second, (loss, shown) in enumerate(((math.nan, "NaN"), (math.inf, "infinite"), (0.5, "0.5"))):
        made = sample(60 + second)
        assert made.job is not None
        live.feed.hear(replace(made, job=replace(made.job, loss=loss)))
        opened.has("[data-chart=loss] .value b", shown)
    assert opened.complaints == []


def test_runs_of_one_name_are_told_apart_by_command_and_end(show: Show, tmp_path: Path) -> None:
    for pid, way, end in ((1, "--slow", "ValueError: no labels"), (2, "--fast", "finished")):
        folder = logged_run(tmp_path, [sample(second) for second in range(2)], name="train", pid=pid)
        write_run(folder, replace(read_run(folder), command=("/bin/python", "train.py", way)))
        end_run(folder, time_s=START_S + 2, end=end, exit_code=pid)
    with PageServer(root=tmp_path) as server:
        opened = show(server.url)
        page = opened.browser_page
        page.click("summary")
        row = page.locator(".menu tbody tr", has_text="--slow")
        playwright.expect(row).to_contain_text("ValueError: no labels")
        playwright.expect(row.locator(".verdict-of")).to_have_text("n/a")
        playwright.expect(page.locator(".search input")).to_be_focused()
        page.keyboard.type("fast")
        playwright.expect(page.locator(".menu .command")).to_have_text(["train.py --fast"])
        assert opened.complaints == []


def test_runs_side_by_side_share_the_scale_of_their_losses(show: Show, tmp_path: Path) -> None:
    def loss(factor: float) -> list[Sample]:
        made = [sample(second) for second in range(60)]
        return [replace(one, job=replace(one.job, loss=factor)) for one in made if one.job is not None]

    keys = [
        logged_run(tmp_path, loss(factor), name=f"x{factor}", pid=int(factor)).name for factor in (1.0, 8.0)
    ]
    with PageServer(root=tmp_path) as server:
        alone = show(f"{server.url}?run={keys[0]}")
        alone.rows(60)
        both = show(f"{server.url}?run={keys[0]}&run={keys[1]}")
        both.rows(60)
        both.rows(60, run=1)
        both.evaluate(TWO_FRAMES)
        assert alone.height("loss") < 0.6  # in the middle of its own range
        assert both.height("loss") > 0.6  # near the bottom of the range of both


# Harm


def hostile(second: float) -> Sample:
    one = sample(second, name=HOSTILE, notes=(HOSTILE,) if second % 20 == 0 else ())
    return replace(
        one,
        gpus=tuple(replace(gpu, name=HOSTILE, throttle_reasons=(HOSTILE,)) for gpu in one.gpus),
        processes=tuple(replace(process, name=HOSTILE) for process in one.processes),
    )


def test_hostile_names_are_text_and_do_nothing(show: Show, tmp_path: Path) -> None:
    logged_run(tmp_path, [hostile(second) for second in range(60)], name=HOSTILE, pid=1)
    with PageServer(root=tmp_path) as server:
        opened = show(server.url)
        opened.rows(60)
        opened.browser_page.click("summary")
        assert opened.evaluate("document.querySelectorAll('img').length") == 0
        for selector in (
            "h2",
            ".menu .name",
            ".gpus td[data-column=Name]",
            ".processes td[data-column=Name]",
            ".notes li",
        ):
            assert "<img src=x onerror=alert(1)>" in opened.text(selector), selector
        assert opened.evaluate("document.title").startswith("<img src=x")
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith(server.url)] == []


def test_the_nodes_of_a_fleet_stand_on_one_page_and_each_opens(show: Show, tmp_path: Path) -> None:
    for number, host in enumerate((HOSTILE, "gpu-node-2", "gpu-node-10")):
        logged_run(tmp_path, [sample(second) for second in range(60)], pid=number + 1, host=host)
    with PageServer(fleet=Fleet([str(tmp_path)])) as server:
        opened = show(server.url)
        names = opened.browser_page.locator(".nodes .name")
        playwright.expect(names).to_have_count(3)
        assert names.all_inner_texts()[1:] == ["gpu-node-2", "gpu-node-10"]
        assert "<img src=x onerror=alert(1)>" in names.first.inner_text()
        assert opened.evaluate("document.querySelectorAll('img').length") == 0
        assert "waits for data" in opened.browser_page.locator(".nodes tbody tr").nth(1).inner_text()
        names.nth(2).click()
        playwright.expect(opened.browser_page.locator(".nodes tr.shown .name")).to_have_text("gpu-node-10")
        opened.rows(60)
        assert opened.complaints == []


def test_script_that_got_in_would_not_run(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    refused = opened.evaluate(
        """(() => {
          const refused = [];
          const attempt = (name, act) => { try { act(); } catch { refused.push(name); } };
          const script = document.createElement("script");
          attempt("text", () => { script.textContent = "window.owned = 1"; });
          document.body.append(script);
          attempt("markup", () => { document.body.innerHTML = "<b>x</b>"; });
          return refused;
        })()"""
    )
    assert refused == ["text", "markup"]
    assert opened.evaluate("window.owned") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_silent_and_asks_no_other_host(show: Show, live: PageServer, scheme: str) -> None:
    opened = show(live.url, scheme=scheme)
    opened.rows(60)
    assert opened.complaints == []
    assert len(opened.requests) > 8
    assert [url for url in opened.requests if not url.startswith(live.url)] == []


def test_with_a_token_all_the_page_asks_for_carries_it(show: Show, tmp_path: Path) -> None:
    everywhere = "0.0.0.0"
    with PageServer(sampler=Sampler(), root=tmp_path, host=everywhere) as server:
        fed(server, range(60))
        address = f"http://127.0.0.1:{server.port}/{server.token}/"
        opened = show(address)
        opened.rows(60)
        assert server.url.endswith(f":{server.port}/{server.token}/")
        assert [url for url in opened.requests if not url.startswith(address)] == []
        port = server.port
    with PageServer(sampler=Sampler(), root=tmp_path, host=everywhere, port=port):  # with another token
        opened.has(".status span", "open the address that flatout printed")


# Looks


def luminances(opened: WatchPage) -> tuple[float, float]:
    colours = opened.evaluate(
        "['color', 'backgroundColor'].map(k => getComputedStyle(document.documentElement)[k]"
        ".match(/\\d+/g).slice(0, 3).map(Number))"
    )
    ink, paper = (sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True)) for rgb in colours)
    return ink, paper


def test_dark_and_light_can_both_be_read_and_chosen(show: Show, live: PageServer) -> None:
    light = show(live.url)
    light.rows(60)
    ink, paper = luminances(light)
    assert paper - ink > 150
    drawn = light.picture("utilisation")
    light.browser_page.click(".theme")
    ink, paper = luminances(light)
    assert ink - paper > 150
    assert light.picture("utilisation") != drawn
    light.browser_page.reload()
    light.rows(60)
    assert luminances(light)[0] > 150
    light.browser_page.click(".theme")
    assert luminances(light)[1] > 150
    assert light.evaluate("localStorage.length") == 0
    ink, paper = luminances(show(live.url, scheme="dark"))
    assert ink - paper > 150


CUT_LEGENDS = (
    "[...document.querySelectorAll('.legend li')].filter((item) => item.scrollWidth > item.clientWidth)"
    ".map((item) => item.textContent)"
)


@pytest.mark.parametrize("make", [sample, hostile], ids=["plain", "hostile"])
def test_nothing_sticks_out_sideways(show: Show, tmp_path: Path, make: Any) -> None:
    name = HOSTILE * 3 if make is hostile else "train"
    logged_run(tmp_path, [make(second) for second in range(60)], name=name, pid=1)
    with PageServer(root=tmp_path) as server:
        opened = show(server.url, width=360)
        opened.rows(60)
        for width in (360, 390, 820, 1280):
            opened.browser_page.set_viewport_size({"width": width, "height": 800})
            opened.evaluate(TWO_FRAMES)
            assert opened.evaluate(OVERFLOW) == 0, width
            canvas = opened.browser_page.locator("[data-chart=utilisation] canvas").bounding_box()
            assert 150 < canvas["width"] < width
            assert opened.evaluate(CUT_LEGENDS) == [], width
        opened.browser_page.click("summary")
        assert opened.evaluate(OVERFLOW) == 0


def test_a_chart_is_read_with_the_arrow_keys(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    page = opened.browser_page
    page.focus("[data-chart=loss] .plot")
    latest = opened.text("[data-chart=loss] .value b")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert opened.text("[data-chart=loss] .value b") != latest
    assert opened.text("[data-chart=loss] .value span").count(":") == 2
    # All charts of the run speak of the same moment.
    assert opened.text("[data-chart=cpu] .value span") == opened.text("[data-chart=loss] .value span")
    page.keyboard.press("Escape")
    assert opened.text("[data-chart=loss] .value b") == latest
    label = page.get_attribute("[data-chart=loss] .plot", "aria-label")
    assert label == f"Loss, as the job reports it: {latest}"


def test_every_control_is_reached_with_the_tab_key_and_has_a_name(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    opened.rows(60)
    reached = []
    for _ in range(40):
        opened.browser_page.keyboard.press("Tab")
        reached.append(
            opened.evaluate(
                "(() => { const e = document.activeElement;"
                " return e.ariaLabel || e.innerText || e.closest('label')?.innerText || e.tagName })()"
            )
        )
    for name in ("Runs 1", "5 min", "Change to dark", "FO101"):
        assert name in [text.strip() for text in reached], (name, reached)
    assert sum("GPU utilisation" in text for text in reached) >= 1


def test_the_range_changes_what_is_drawn(show: Show, tmp_path: Path) -> None:
    logged_run(tmp_path, [sample(second) for second in range(900)], pid=1)
    with PageServer(root=tmp_path) as server:
        opened = show(server.url)
        opened.rows(900)
        drawn = [opened.picture("loss")]
        for name in ("1 h", "all"):
            opened.browser_page.get_by_text(name, exact=True).click()
            opened.evaluate(TWO_FRAMES)
            drawn.append(opened.picture("loss"))
    assert drawn[0] != drawn[1] == drawn[2]


# The store: what a page keeps


def test_rows_are_replaced_by_what_overlaps_them_and_holes_are_gaps(show: Show, live: PageServer) -> None:
    opened = show(live.url)
    found = opened.evaluate(STORE)
    assert found["overlapped"] == [[1, 2, 3, 4], [0.1, 0.5, 0.6, 0.7]]
    assert found["holed"] == [[1, 2, 3, 4, 5, 32, 60], [0.1, 0.5, 0.6, 0.7, 0.8, None, 0.9]]
    times, values = found["long"]
    assert len(times) == len(values) <= 4000
    assert times == sorted(set(times))
    assert times[0] < 100 and times[-1] == 8999


# Pictures


def runs_for_pictures(root: Path) -> list[Path]:
    """The folders named by the variable, or runs that are made up: a starved one and a healthy one."""
    chosen = os.environ[PICTURES]
    if chosen != "1":
        return [Path(folder) for folder in chosen.split(os.pathsep)]
    starved = [sample(second) for second in range(300)]
    healthy = [sample(second, busy=0.95, wait=0.02, steps_per_s=9.6) for second in range(300)]
    folders = [
        logged_run(root, starved, name="pretrain, 2 workers"),
        logged_run(root, healthy, name="pretrain, 16 workers"),
    ]
    for folder in folders:
        end_run(folder, time_s=START_S + 300, end="finished", exit_code=0)
    return folders


@pytest.mark.skipif(not os.environ.get(PICTURES), reason=f"{PICTURES} is not set: docs/images stays as it is")
def test_take_the_pictures(show: Show, tmp_path: Path, repository: Path) -> None:
    folder = repository / "docs" / "images"
    folder.mkdir(exist_ok=True)
    runs = runs_for_pictures(tmp_path)
    with PageServer(folders=runs, root=tmp_path) as server:
        one = f"{server.url}?run={runs[0].name}"
        shots = {
            "watch_light": show(one, width=1280, height=800),
            "watch_dark": show(one, width=1280, height=800, scheme="dark"),
            "watch_phone": show(one, width=360, height=780),
        }
        if len(runs) > 1:
            shots["watch_two_runs"] = show(f"{one}&run={runs[1].name}", width=1440, height=900)
            shots["watch_two_runs"].browser_page.click("button.overlay")
        for name, opened in shots.items():
            opened.evaluate(TWO_FRAMES)
            opened.browser_page.screenshot(path=folder / f"{name}.png")
