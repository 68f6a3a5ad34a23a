from __future__ import annotations

import pytest

from flatout.doctor.examine import examine
from flatout.doctor.rules.loops.row_indexing_in_loop import detect


def indexing(made, *sites, **fields):
    return made.evidence(sites=sites, **fields)


def test_fires_at_the_indexing_line_with_its_backward(made):
    rows = made.site("row", op="__getitem__", host_s=0.01, backward_s=0.05, requires_grad=True)
    knocked_out = made.counterfactual("knock-out", 4.0, line=28, last_line=31)
    (finding,) = detect(indexing(made, rows, counterfactuals=(knocked_out,)))
    assert (finding.code, finding.name) == ("FO302", "row-indexing-in-loop")
    assert finding.place.line == 30
    assert finding.share == pytest.approx(0.3)
    assert finding.ceiling.step_s == pytest.approx(0.025)
    assert finding.safety == "reordered"
    assert any("50.0 ms" in figure for figure in finding.evidence)


def test_a_line_that_is_free_when_knocked_out_is_no_finding(made):
    knocked_out = made.counterfactual("knock-out", 1.0, line=30)
    assert detect(indexing(made, made.site("row"), counterfactuals=(knocked_out,))) == []


def test_a_line_that_no_arm_ran_at_has_a_share_and_no_ceiling(made):
    (finding,) = detect(indexing(made, made.site("row")))
    assert finding.share == pytest.approx(0.1)
    assert finding.ceiling is None
    assert "could run here" in finding.no_ceiling


def test_without_gradients_the_fix_is_exact(made):
    (finding,) = detect(indexing(made, made.site("row")))
    assert finding.safety == "exact"
    assert "gradient" not in finding.message


@pytest.mark.parametrize(("calls", "fires"), [(10.0, True), (9.5, False)])
def test_ten_rows_make_a_loop(made, calls, fires):
    assert bool(detect(indexing(made, made.site("row", calls_per_step=calls)))) == fires


@pytest.mark.parametrize(("host_s", "fires"), [(0.0061, True), (0.0059, False), (None, False)])
def test_the_rows_must_matter(made, host_s, fires):
    assert bool(detect(indexing(made, made.site("row", host_s=host_s)))) == fires


def test_a_cheap_forward_with_a_dear_backward_fires(made):
    assert detect(indexing(made, made.site("row", host_s=0.001, backward_s=0.01)))
    assert detect(indexing(made, made.site("row", host_s=None, backward_s=0.01)))


def test_reads_and_writes_of_one_line_are_one_finding(made):
    read = made.site("row", op="__getitem__", calls_per_step=6.0, host_s=0.004)
    write = made.site("row", op="__setitem__", calls_per_step=6.0, host_s=0.004)
    (finding,) = detect(indexing(made, read, write))
    assert finding.share == pytest.approx(0.04)


def test_look_alikes(made):
    assert detect(indexing(made, made.site("row", via="torch/utils/data/dataset.py:211"))) == []
    assert detect(indexing(made, made.site("create"))) == []
    sample = made.site("row", place=made.place(5, function="Samples.__getitem__"))
    assert detect(indexing(made, sample)) == []
    assert detect(indexing(made, made.site("row"), attributed_step_s=None)) == []


def test_no_gradient_is_claimed_that_no_backward_pass_computed(made):
    """Rows of a tensor that needs gradients, read as plain numbers."""
    (finding,) = detect(indexing(made, made.site("row", requires_grad=True)))
    assert "gradient" not in finding.message


def test_no_patch_is_named_for_rows_that_are_written(made):
    read, written = (made.site("row", op=op, host_s=0.1) for op in ("__getitem__", "__setitem__"))
    for sites, names in (([read], True), ([read, written], True), ([written], False)):
        (finding,) = examine(made.evidence(sites=tuple(sites)))
        assert (finding.code, bool(finding.tune)) == ("FO302", names)


def test_rows_that_are_written_are_said_to_be(made):
    read, written = (
        detect(made.evidence(sites=(made.site("row", op=op, host_s=0.1),)))
        for op in ("__getitem__", "__setitem__")
    )
    assert "rows are indexed" in read[0].message and "unbind" in read[0].fix
    assert "rows are written" in written[0].message and "write all rows at once" in written[0].fix
