"""Pictures of a run: a file that opens, whatever is missing or hostile."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.engines.adapters.report.page import RunReport
from flatout.engines.adapters.report.plots import plot_report
from flatout.errors import BadInput
from tests.support.adapters import evaluation, hostile_report, report, scores

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.parametrize(
    "run",
    [
        report(),
        report(evaluation=None),
        report(records=(), evaluation=evaluation(scores=(scores("oracle", 0),), routing=None)),
        hostile_report(),
    ],
    ids=["full", "not evaluated", "no log, no router", "hostile"],
)
def test_every_run_has_a_picture(run: RunReport, tmp_path: Path) -> None:
    path = plot_report(run, tmp_path / "deep" / "run.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in path.parent.iterdir()] == ["run.png"]


def test_the_suffix_decides_the_kind(tmp_path: Path) -> None:
    assert b"<svg" in plot_report(report(), tmp_path / "run.svg").read_bytes()
    with pytest.raises(BadInput, match=r"neither a \.png nor a \.svg"):
        plot_report(report(), tmp_path / "run.pdf")
