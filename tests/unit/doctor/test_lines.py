from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.lines import (
    direct_lines,
    line_share,
    lines_of,
    share_interval,
    show_calls,
    show_ops,
    show_timing,
)
from flatout.measure.evidence import StackPath, Stacks


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
    assert show_timing(made.evidence(), line) == "40.0 ms of a step of 200 ms while calls were timed"


def attributed(made, *, site, calls_s, backward_s=0.05, steps_s=()):
    """A step of 0.1 s: forward 40 %, backward 50 %; the instrument slowed it tenfold."""
    return made.evidence(
        sites=(dataclasses.replace(site, steps_s=steps_s),),
        attributed_step_s=1.0,
        attributed_calls_s=calls_s,
        attributed_backward_s=backward_s,
    )


def share(made, **changes):
    evidence = attributed(made, **changes)
    (line,) = lines_of(list(evidence.sites))
    return line_share(evidence, line)


def test_a_line_holds_its_part_of_each_phases_calls_and_the_phase_its_share_of_ordinary_steps(made):
    site = made.site("row", host_s=0.01, backward_s=0.02, phases_s={"forward": 0.01})
    # a quarter of the forward, two fifths of the backward
    assert share(made, site=site, calls_s={"forward": 0.03}) == pytest.approx(0.25 * 0.4 + 0.4 * 0.5)


def test_calls_that_the_instrument_slowed_are_never_more_than_their_phase(made):
    site = made.site("row", host_s=0.4, backward_s=None, phases_s={"forward": 0.4})
    assert share(made, site=site, calls_s={"forward": 0.5}) == pytest.approx(0.8 * 0.4)
    assert share(made, site=site, calls_s={"forward": 0.1}) == pytest.approx(0.4)


def test_without_the_calls_of_each_phase_the_slowed_step_is_the_whole(made):
    site = made.site("row", host_s=0.3, backward_s=0.1)
    assert share(made, site=site, calls_s={}) == pytest.approx(0.4)


def test_a_share_has_an_interval_over_the_attributed_steps(made):
    site = made.site("row", host_s=0.01, backward_s=None, phases_s={"forward": 0.01})
    evidence = attributed(made, site=site, calls_s={"forward": 0.04}, steps_s=(0.008, 0.01, 0.012))
    (line,) = lines_of(list(evidence.sites))
    low, high = share_interval(0.1, line)
    assert 0.08 <= low < 0.1 < high <= 0.12
    assert "over 3 such steps" in show_timing(evidence, line)
    once = dataclasses.replace(line, steps_s=(0.01,))
    assert share_interval(0.1, once) is None
    assert "such steps" not in show_timing(evidence, once)


def test_where_no_call_was_timed_the_looks_at_the_stack_give_the_share(made):
    site = made.site("row", host_s=None)
    stacks = Stacks(
        num_steps=4,
        samples_by_phase={"forward": 80, "backward": 120},
        paths=(
            StackPath(phase="forward", places=(made.place(9), site.place), samples=60),
            StackPath(phase="backward", places=(made.place(9),), samples=120),
        ),
    )
    evidence = made.evidence(sites=(site,), stacks=stacks)
    (line,) = lines_of([site])
    assert line_share(evidence, line) == pytest.approx(0.75 * 0.4)
    assert "not timed" in show_timing(evidence, line)
    without = made.counterfactual("knock-out", 5.0, line=29, last_line=31)
    measured = dataclasses.replace(evidence, counterfactuals=(without,))
    assert line_share(measured, line) == pytest.approx(0.8)  # with the backward pass, which no look shows
    other = StackPath(phase="forward", places=(made.place(9), made.place(31)), samples=20)
    shared = dataclasses.replace(stacks, paths=(*stacks.paths, other))
    shared = dataclasses.replace(measured, stacks=shared)
    assert line_share(shared, line) == pytest.approx(0.8 * 60 / 80)  # the other line has its part
    assert line_share(made.evidence(sites=(site,)), line) is None


def test_a_backward_pass_that_a_line_asks_for_is_not_the_time_of_its_rows(made):
    """`torch.autograd.grad(f[:, i].sum(), z)[0][:, i]` indexes rows and waits for gradients."""
    site = made.site("row", host_s=None)
    gradients = StackPath(phase="backward", places=(site.place,), samples=190, library="torch/autograd")
    rows = StackPath(phase="forward", places=(site.place,), samples=10)
    stacks = Stacks(num_steps=4, samples_by_phase={"forward": 10, "backward": 190}, paths=(gradients, rows))
    (line,) = lines_of([site])
    assert line_share(made.evidence(sites=(site,), stacks=stacks), line) == pytest.approx(0.4)
    without = made.counterfactual("knock-out", 2.0, line=29, last_line=31)
    mostly = dataclasses.replace(stacks, samples_by_phase={"forward": 100, "backward": 190})
    measured = made.evidence(sites=(site,), stacks=mostly, counterfactuals=(without,))
    assert line_share(measured, line) == pytest.approx(max(0.1 * 0.4, 0.5 * 10 / 200))


def test_what_else_a_line_calls_is_not_the_time_of_its_rows(made):
    """`decoder(x[:, t], hidden)` indexes a row, and runs the model on it."""
    site = made.site("row", host_s=None)
    rows = StackPath(phase="forward", places=(site.place,), samples=5)
    model = StackPath(phase="forward", places=(site.place, made.place(70)), samples=60)
    module = StackPath(phase="forward", places=(site.place,), samples=35, library="torch/nn/modules")
    stacks = Stacks(num_steps=4, samples_by_phase={"forward": 100}, paths=(rows, model, module))
    without = made.counterfactual("knock-out", 5.0, line=29, last_line=31)
    evidence = made.evidence(sites=(site,), stacks=stacks, counterfactuals=(without,))
    (line,) = lines_of([site])
    assert line_share(evidence, line) == pytest.approx(0.8 * 5 / 100)
    (cells,) = lines_of([dataclasses.replace(site, kind="cell", op="gru_cell")])
    assert line_share(evidence, cells) == pytest.approx(0.8 * 40 / 100)  # a cell is a module


def test_a_step_in_which_the_thread_lost_its_core_is_not_the_lines(made):
    steps_s = (1e-4, 1e-4, 1e-4, 1e-2, 1e-4, 1e-4, 1e-4, 1e-4)
    mean_s = sum(steps_s) / len(steps_s)
    (line,) = lines_of([made.site("create", host_s=mean_s, phases_s={"rest": mean_s}, steps_s=steps_s)])
    assert line.host_s == pytest.approx(1e-4)
    assert line.phases_s["rest"] == pytest.approx(1e-4)
    assert len(line.steps_s) == 7
