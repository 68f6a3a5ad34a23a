"""The log of a node, asked of the page that it serves."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.monitor.fleet.logs import PageLog
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.web.server import PageServer
from tests.support.monitor_web import logged_run, sample

pytest.importorskip("starlette", reason="starlette is not installed: flatout[web]")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: flatout[web]")


def seconds(found: list[object]) -> list[int | None]:
    return [each.job.steps for each in found]  # type: ignore[attr-defined]


def test_whoever_asks_anew_is_given_what_it_missed(tmp_path: Path) -> None:
    folder = logged_run(tmp_path, [sample(second, steps_per_s=1.0) for second in range(1, 6)], host="gpu-7")
    with PageServer(root=tmp_path, token=True) as server:
        log = PageLog(server.url)
        assert seconds(log.past()) == [1, 2, 3, 4, 5]
        assert log.run is not None and log.run.name == "train" and log.run.command == ()
        assert log.more() == []
        writer = HistoryWriter(folder)
        for second in (6, 7):
            writer(sample(second, steps_per_s=1.0))
        writer.close()
        assert seconds(log.more()) == [6, 7]
        assert seconds(PageLog(server.url).past()) == [1, 2, 3, 4, 5, 6, 7]
        assert log.problem is None
        stranger = PageLog(server.url.replace(server.token or "", "guessed"))
        assert stranger.past() == [] and stranger.problem == "the address lacks the page's token"
        assert not stranger.has_answered
    assert log.more() == [] and log.problem == "connection refused"
    assert log.has_answered


def test_what_answers_and_is_no_page_of_ours_is_said() -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if "hello" in self.path else 404)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path, problem in (("hello", "not a page of Flatout"), ("gone", "HTTP error 404")):
            log = PageLog(f"http://127.0.0.1:{server.server_port}/{path}")
            assert log.past() == [] and log.problem == problem
        server.shutdown()


def test_what_is_no_page_is_refused() -> None:
    for address in ("file:///etc/passwd", "ftp://host/", "http://"):
        with pytest.raises(BadInput, match="not the address of a page"):
            PageLog(address)
