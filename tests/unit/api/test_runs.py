from __future__ import annotations

from pathlib import Path

import pytest

from flatout.api import compare_runs, report_run, watch_script
from flatout.ground.errors import BadInput
from tests.support.monitor import kept_run, story


def test_runs_are_reported_and_compared(tmp_path: Path) -> None:
    first = kept_run(tmp_path, story(seconds=60), pid=1)
    kept_run(tmp_path, story(seconds=60, step_s=0.2), pid=2)
    page = tmp_path / "run.html"
    summary = report_run(first, html=page)
    assert summary.step_s == pytest.approx(0.081, rel=0.02)
    assert page.exists()
    comparison = compare_runs(first, "train-2", root=tmp_path)
    assert comparison.differences[0].outcome == "worse"


def test_a_watched_script_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no script at"):
        watch_script([str(tmp_path / "absent.py")])
