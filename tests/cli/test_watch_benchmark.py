"""The benchmark of the monitor: its browsers are real, and the table of the docs is made from its files."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flatout.monitor.sampler import Sampler
from flatout.monitor.web.server import PageServer


@pytest.fixture
def load_module(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("docs", "benchmarks/monitor"):
        monkeypatch.syspath_prepend(str(repository / folder))

    def load(name: str) -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def test_browsers_hear_samples_beside_one_that_never_reads(load_module: Any, tmp_path: Path) -> None:
    browsers = load_module("browsers")
    with Sampler(hz=10.0) as sampler, PageServer(sampler=sampler, root=tmp_path) as page:
        seen = asyncio.run(browsers.browse(page.url, num=5, silent=1, seconds=2.0))
    assert (seen["browsers"], seen["silent"]) == (5, 1)
    assert seen["fewest_samples"] > 0


def test_the_table_of_the_page_is_that_of_the_files(
    load_module: Any, tmp_path: Path, repository: Path
) -> None:
    figures = load_module("watch_figures")
    page = (repository / "docs" / "watch.md").read_text(encoding="utf-8")
    assert figures.NOT_MEASURED in figures.with_tables(page, folder=tmp_path)
    ratio = {"ratio": 1.00123, "low": 0.999, "high": 1.002}
    alone = {"cpu_share_of_a_core": 0.004, "rss_bytes": 58e6, "first_sample_s": 0.23}
    result = {
        "hardware": "NVIDIA H200",
        "torch": "2.11",
        "note": None,
        "workloads": {"encoder": {"step_s": 0.029, "1 Hz": ratio, "traceml": None}},
        "alone": {"flatout 1 Hz": alone, "codecarbon 1 Hz": None},
    }
    (tmp_path / "monitor_nvidia-h200_2026-11-15.json").write_text(json.dumps(result))
    table = figures.with_tables(page, folder=tmp_path)
    assert "| Flatout, 1 Hz | 1.0012 [0.9990, 1.0020] | 0.40% of a core | 58 MB | 0.23 s |" in table
    assert "codecarbon" not in table.partition("What it costs")[2].partition("## Other tools")[0]


def test_the_tests_that_the_page_names_exist(repository: Path) -> None:
    page = (repository / "docs" / "watch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) >= 25
    sources = (path.read_text(encoding="utf-8") for path in (repository / "tests").rglob("test_*.py"))
    found = {
        name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, flags=re.MULTILINE)
    }
    assert named - found == set()
