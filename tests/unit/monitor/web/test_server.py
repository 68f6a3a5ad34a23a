"""The server as browsers meet it: its files, its doors, and many of them at once."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.errors import BadInput, MissingExtra
from flatout.monitor.sampler import Sampler
from flatout.monitor.verdicts.verdict import (
    COMPUTE_RULES,
    DATA_RULES,
    HOST_RULES,
    SMALL_KERNEL_RULES,
    TRANSFER_RULES,
)
from flatout.monitor.web import run_stream as stream_room
from flatout.monitor.web.access import POLICY
from flatout.monitor.web.connections import MOST
from flatout.monitor.web.server import KINDS, PageServer, serve, static_files
from tests.support.monitor_web import HOSTILE, START_S, Listener, connect, fetch, logged_run, sample

pytest.importorskip("starlette", reason="starlette is not installed: flatout[web]")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: flatout[web]")


HIGH_WATER_BYTES = 64 * 1024  # asyncio's: a transport that holds more takes nothing


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    """The page of a sampler that a test feeds by hand."""
    with PageServer(sampler=Sampler(), root=tmp_path) as server:
        yield server


# Files


def test_the_page_and_all_it_names_are_served(page: PageServer) -> None:
    index = fetch(page.url)
    assert index.status == 200
    named = re.findall(r'(?:src|href)="([^"]+)"', index.text)
    assert len(named) >= 6
    scripts = [name for name in static_files() if name.endswith(".js") and not name.startswith("uPlot")]
    for script in scripts:
        named += [
            f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', static_files()[script].decode())
        ]
    for path in set(named):
        answer = fetch(page.url, path)
        assert answer.status == 200, path
        assert answer.headers["content-type"] == KINDS[Path(path).suffix]
        assert answer.body == static_files()[Path(path).name]


def test_nothing_of_the_page_names_another_host_or_makes_markup_of_text() -> None:
    own = {name: text.decode() for name, text in static_files().items() if not name.startswith("uPlot")}
    assert len(own) >= 9
    for name, text in own.items():
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w+\.\w+/", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), name
        assert not re.search(r"<script>|<style|\son\w+=|style=", text), name


def test_uplot_comes_with_its_licence() -> None:
    files = static_files()
    assert {"uPlot.iife.min.js", "uPlot.min.css"} <= files.keys()
    assert b"MIT" in files["uPlot.LICENSE.txt"]
    assert b"Leon Sorokin" in files["uPlot.LICENSE.txt"]


@pytest.mark.parametrize(
    "path",
    [
        "static/",
        "static/none.js",
        "static/..%2fserver.py",
        "static/../server.py",
        "/etc/passwd",
        "rules/FO000",
        "x",
    ],
)
def test_anything_else_is_not_there(page: PageServer, path: str) -> None:
    assert fetch(page.url, path).status == 404


def test_rules_of_every_verdict_have_their_page(page: PageServer) -> None:
    codes = {*DATA_RULES, *TRANSFER_RULES, *HOST_RULES, *SMALL_KERNEL_RULES, *COMPUTE_RULES}
    for code in codes:
        answer = fetch(page.url, f"rules/{code}")
        assert answer.status == 200
        assert f"<span>{code}</span>" in answer.text


def test_metrics_are_those_of_the_last_sample(tmp_path: Path) -> None:
    sampler = Sampler()
    with PageServer(sampler=sampler, root=tmp_path) as server:
        assert fetch(server.url, "metrics").text == ""
        sampler.take()
        assert "# TYPE flatout_host_memory_used_bytes gauge" in fetch(server.url, "metrics").text


# Doors


@pytest.mark.parametrize("path", ["", "events?run=none", "static/page.js", "nothing"])
def test_every_answer_is_guarded(page: PageServer, path: str) -> None:
    if path.startswith("events"):
        with Listener(page.url, "?run=none") as listener:
            headers = listener.answer.headers
    else:
        headers = fetch(page.url, path).headers
    assert headers["content-security-policy"] == POLICY
    assert "'unsafe-inline'" not in POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_another_sites_name_is_refused(page: PageServer) -> None:
    assert fetch(page.url, host="evil.example").status == 403
    assert fetch(page.url, "events", host=f"evil.example:{page.port}").status == 403


def test_on_loopback_no_token_is_needed(page: PageServer) -> None:
    assert page.token is None
    assert page.url == f"http://127.0.0.1:{page.port}/"


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"token": True}])
def test_beyond_loopback_and_where_asked_the_address_holds_a_token_and_no_log_does(
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    with PageServer(**options, root=tmp_path) as server:
        assert server.token is not None
        assert server.url.endswith(f":{server.port}/{server.token}/")
        assert fetch(server.url).status == 200
        assert fetch(server.url, "static/page.js").status == 200
        with Listener(server.url) as listener:
            assert listener.answer.status == 200
            listener.until("ready")
        for path in ("/", "/events", "/static/page.js", "/wrong/", f"/{server.token[:-1]}/"):
            assert fetch(server.url, path).status == 403
        # A request that is none, as the token might be in what a log says about it.
        with connect(server.url, f"/{server.token}/ \x00") as broken:
            broken.recv(1000)
    written = capfd.readouterr()
    assert server.token not in caplog.text + written.out + written.err


def test_only_reading_is_possible(page: PageServer) -> None:
    for method in (b"POST", b"PUT", b"DELETE"):
        with socket.create_connection(("127.0.0.1", page.port), timeout=60) as connection:
            connection.sendall(method + b" /events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
            assert b" 405 " in connection.recv(100)


def test_a_port_that_is_taken_is_one_sentence(page: PageServer, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"port {page.port}") as caught:
        PageServer(port=page.port, root=tmp_path).start()
    assert "--port" in str(caught.value)
    with pytest.raises(BadInput, match=r"192\.0\.2\.1") as elsewhere:
        PageServer(host="192.0.2.1", root=tmp_path).start()
    assert "--host" in str(elsewhere.value)
    with pytest.raises(BadInput, match="no port 99999"):
        PageServer(port=99999, root=tmp_path).start()


def test_without_the_extra_it_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(MissingExtra, match=r"flatout\[web\]"):
        PageServer(root=tmp_path)


def test_importing_the_server_imports_neither_starlette_nor_torch() -> None:
    code = (
        "import sys, flatout.monitor.web.server;"
        "print(sorted({'torch', 'numpy', 'starlette', 'uvicorn'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Events


def test_a_page_hears_history_and_samples_and_comes_again_after_a_restart(tmp_path: Path) -> None:
    sampler = Sampler()
    with PageServer(sampler=sampler, root=tmp_path) as server:
        for second in range(3):
            server.feed.hear(sample(second, name=HOSTILE))
        with Listener(server.url) as listener:
            assert listener.answer.headers["content-type"].startswith("text/event-stream")
            listener.until("ready")
            server.feed.hear(sample(3, name=HOSTILE))
            [event] = listener.until("sample")
            assert event.data["sample"]["job"]["name"] == HOSTILE
            assert listener.last_id == str(round((START_S + 3) * 1000))
            port = server.port
            server.stop()
            assert list(listener.events()) == []  # the server ended the stream, and did not wait for it
    with PageServer(sampler=sampler, root=tmp_path, port=port) as server:
        for second in range(2, 6):
            server.feed.hear(sample(second))
        with Listener(server.url, last_id=listener.last_id) as again:
            history = next(event for event in again.until("ready") if event.name == "history")
            assert not history.data["is_whole"]
            assert history.data["sample"]["time_s"] == START_S + 5
        with Listener(server.url, f"?since={listener.last_id}") as again:
            assert not next(event for event in again.events() if event.name == "history").data["is_whole"]


def test_run_folders_are_shown_without_a_sampler(tmp_path: Path) -> None:
    folders = [logged_run(tmp_path, [sample(0), sample(1)], name=name, pid=3) for name in ("one", "two")]
    with PageServer(folders=folders, root=tmp_path) as server, Listener(server.url) as listener:
        heard = listener.until("ready")
    assert heard[-1].data["runs"] == [folder.name for folder in folders]


def test_fifty_browsers_hear_every_sample_and_each_is_encoded_once(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_browsers, num_samples = 50, 30
    encoded = []
    original = stream_room.sample_document

    def counted(one: Any, **options: Any) -> Any:
        encoded.append(one.time_s)
        return original(one, **options)

    page.feed.hear(sample(0))
    with contextlib.ExitStack() as stack:
        browsers = [stack.enter_context(Listener(page.url)) for _ in range(num_browsers + 1)]
        for browser in browsers:
            browser.until("ready")
        browsers.pop()  # this one reads no further
        monkeypatch.setattr(stream_room, "sample_document", counted)
        for second in range(1, num_samples + 1):
            page.feed.hear(sample(second))
            for browser in browsers:
                [event] = browser.until("sample")
                assert event.data["sample"]["time_s"] == START_S + second
        assert len(page.feed.clients) == num_browsers + 1
    assert encoded == [START_S + second for second in range(1, num_samples + 1)]


def test_a_browser_that_never_reads_grows_nothing(page: PageServer) -> None:
    """What it does not take is many times what is allowed here, if it were kept for it."""
    num_samples, note = 200, "x" * 20_000
    page.feed.hear(sample(0))
    with Listener(page.url) as asleep, Listener(page.url) as awake:
        asleep.until("ready")
        awake.until("ready")
        tracemalloc.start()
        try:
            start_bytes = tracemalloc.get_traced_memory()[0]
            for second in range(1, num_samples):
                page.feed.hear(replace(sample(second), notes=(note,)))
                awake.until("sample")
            grown_bytes = tracemalloc.get_traced_memory()[0] - start_bytes
        finally:
            tracemalloc.stop()
        connections = list(page._server.server_state.connections)
        kept_bytes = [connection.transport.get_write_buffer_size() for connection in connections]
        assert len(page.feed.clients) == len(kept_bytes) == 2
        # It does not take data, and what waits for it is the event that was under way.
        assert HIGH_WATER_BYTES < max(kept_bytes) < HIGH_WATER_BYTES + 2 * len(note)
        assert grown_bytes < num_samples * len(note) / 2
        # When it reads again, it hears first what was under way, then at once how things stand.
        for event in asleep.events():
            if event.data.get("sample", {}).get("time_s") == START_S + num_samples - 1:
                break
        assert event.name == "history"


def test_the_cap_on_browsers_holds_when_all_come_at_once(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.monitor.web.feed.MOST_CLIENTS", 3)
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(connect(page.url, "/events")) for _ in range(8)]
        heads = [each.recv(12) for each in asked]
        assert sorted(heads) == [b"HTTP/1.1 200"] * 3 + [b"HTTP/1.1 503"] * 5
        assert len(page.feed.clients) == 3


def test_connections_without_a_request_are_closed_and_the_page_answers(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.monitor.web.connections.IDLE_S", 0.1)
    with Listener(page.url) as browser, contextlib.ExitStack() as stack:
        browser.until("ready")
        address = ("127.0.0.1", page.port)
        idle = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(20)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: ")  # half of a request
        for each in idle:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        assert fetch(page.url).status == 200
        page.feed.hear(sample(0))
        browser.until("sample")  # it follows on


def test_more_idle_connections_than_there_are_places_keep_no_browser_out(page: PageServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST + 3):
            stack.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=60))
        assert fetch(page.url).status == 200


def test_a_browser_that_left_is_forgotten(page: PageServer) -> None:
    with Listener(page.url) as first, Listener(page.url) as second:
        first.until("ready")
        second.until("ready")
        assert len(page.feed.clients) == 2
        first.__exit__(None, None, None)
        # The other one hears on; once the server has seen the first one go, it is alone.
        for second_s in range(1000):
            page.feed.hear(sample(second_s))
            next(event for event in second.events() if event.name in ("sample", "history"))
            if len(page.feed.clients) == 1:
                break
        assert len(page.feed.clients) == 1


# Serving in the foreground


def test_serve_tells_the_address_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    told: list[int] = []

    def on_ready(url: str) -> None:
        told.append(fetch(url).status)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        serve(root=tmp_path, on_ready=on_ready)
    assert told == [200]
