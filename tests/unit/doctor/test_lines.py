from __future__ import annotations

import pytest

from flatout.doctor.lines import direct_lines, lines_of, show_calls, show_ops, timing


def test_operations_of_one_line_are_summed(made):
    (line,) = lines_of(
        [
            made.site("create", op="zeros", calls_per_step=3.0, host_s=0.01),
            made.site("create", op="ones", calls_per_step=5.0, host_s=None, backward_s=0.02, derived_s=0.03),
        ]
    )
    assert line.ops == ("ones", "zeros")
    assert (line.calls_per_step, line.host_s, line.backward_s) == (8.0, 0.01, 0.02)
    assert line.total_s == pytest.approx(0.03)
    assert line.derived_s == pytest.approx(0.03)


def test_the_busiest_line_comes_first(made):
    lines = lines_of([made.site("row", line=1, calls_per_step=2.0), made.site("row", line=2)])
    assert [line.place.line for line in lines] == [2, 1]


def test_time_that_no_site_knows_is_unknown(made):
    (line,) = lines_of([made.site("row", host_s=None)])
    assert line.total_s is None


@pytest.mark.parametrize("function", ["Samples.__getitem__", "__iter__", "collate"])
def test_fetching_and_collating_are_left_to_the_loader(made, function):
    loader = made.loader(collate_place=made.place(18, function="collate"))
    fetching = made.site("row", place=made.place(19, function=function))
    job = made.evidence(loaders=(loader,), sites=(fetching, made.site("row", line=50)))
    assert [line.place.line for line in direct_lines(job, "row")] == [50]


def test_only_direct_calls_of_the_kind_are_taken(made):
    job = made.evidence(
        sites=(
            made.site("row", line=1, via="torch/utils/data/dataset.py:211"),
            made.site("create", line=2),
            made.site("row", line=3),
        )
    )
    assert [line.place.line for line in direct_lines(job, "row")] == [3]


def test_figures_are_readable(made):
    assert [show_calls(calls) for calls in (1536.4, 64.0, 9.0, 2.5)] == ["1536", "64", "9", "2.5"]
    (line,) = lines_of([made.site("row", op="__getitem__"), made.site("row", op="select", calls_per_step=1)])
    assert show_ops(line) == "x[...], select"
    assert timing(made.evidence(), line) == "40.0 ms of a step of 200 ms while calls were timed"
