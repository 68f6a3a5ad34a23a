"""The log of a node, asked of the page that it serves."""

from __future__ import annotations

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
        assert PageLog(server.url.replace(server.token or "", "guessed")).past() == []
    assert log.more() == []  # nobody answers


def test_what_is_no_page_is_refused() -> None:
    for address in ("file:///etc/passwd", "ftp://host/", "http://"):
        with pytest.raises(BadInput, match="not the address of a page"):
            PageLog(address)
