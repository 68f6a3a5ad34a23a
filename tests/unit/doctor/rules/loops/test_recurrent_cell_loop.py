from __future__ import annotations

import dataclasses

import pytest

from flatout.doctor.rules.loops.recurrent_cell_loop import detect
from flatout.measure.arms.arm import DEPENDS
from flatout.measure.run.step_blocks.schedule import NO_TIME

VIA = "torch/nn/modules/rnn.py:1664"


def cells(made, *arms, **changes):
    fields = {"op": "lstm_cell", "via": VIA, "backward_s": 0.04, **changes}
    return made.evidence(sites=(made.site("cell", **fields),), counterfactuals=arms)


def test_fires_at_the_line_that_calls_the_cell(made):
    arms = (made.counterfactual("library-recurrence", 3.0, line=30),)
    (finding,) = detect(cells(made, *arms, made.counterfactual("knock-out", 8.0, line=30)))
    assert (finding.code, finding.name) == ("FO303", "recurrent-cell-loop")
    assert finding.place.line == 30
    assert finding.share == pytest.approx(0.3)
    assert finding.ceiling.speedup == pytest.approx(3.0)


@pytest.mark.parametrize(("calls", "fires"), [(8.0, True), (7.0, False)])
def test_eight_calls_make_a_loop(made, calls, fires):
    assert bool(detect(cells(made, calls_per_step=calls))) == fires


@pytest.mark.parametrize(("host_s", "fires"), [(0.0101, True), (0.0099, False)])
def test_the_cells_must_matter(made, host_s, fires):
    assert bool(detect(cells(made, host_s=host_s, backward_s=None))) == fires


def test_where_their_time_is_unknown_the_forward_stands_for_it(made):
    (finding,) = detect(cells(made, host_s=None, backward_s=None))
    assert finding.share == pytest.approx(0.4)
    assert finding.ceiling is None


def test_look_alikes(made):
    assert detect(made.evidence(sites=(made.site("row"), made.site("create")))) == []
    assert detect(cells(made, calls_per_step=1.0)) == []


@pytest.mark.parametrize(("width", "fires"), [(0.25, False), (0.40, True)])
def test_a_layer_that_may_gain_nothing_and_little_at_most_is_no_fix(made, width, fires):
    """On a CPU the layer loops as well; leaving the cells out gains in any case."""
    layer = made.counterfactual("library-recurrence", 0.9, width=width, line=31)
    without = made.counterfactual("knock-out", 15.0, line=30, last_line=32)
    site = made.site("cell", line=31, op="lstm_cell", calls_per_step=300.0, host_s=0.1)
    assert bool(detect(made.evidence(sites=(site,), counterfactuals=(layer, without)))) == fires


def layers(made, *arms, reason=None):
    site = made.site("cell", line=31, op="gru", calls_per_step=200.0, host_s=0.05)
    left_out = () if reason is None else (made.not_run("library-recurrence", reason, line=31),)
    return made.evidence(sites=(site,), counterfactuals=arms, arms_not_run=left_out)


def test_a_layer_called_by_position_is_such_a_loop(made):
    (finding,) = detect(layers(made, made.counterfactual("library-recurrence", 3.1, line=31)))
    assert finding.message.startswith("nn.GRU is called 200 times per step here on one position")
    assert finding.ceiling.speedup == pytest.approx(3.1)
    assert "whole sequence in one call" in finding.fix
    without = made.counterfactual("knock-out", 3.3, line=30, last_line=32)
    (finding,) = detect(layers(made, without, made.counterfactual("library-recurrence", 1.3, line=31)))
    assert finding.ceiling.speedup == pytest.approx(3.3)  # the whole loop's body goes with the calls
    one_call = made.counterfactual("library-recurrence", 0.98, width=0.05, line=31)
    assert detect(layers(made, without, one_call)) == []
    (finding,) = detect(layers(made, without, reason="the inputs of a sequence differ in shape or type"))
    assert finding.ceiling.kind == "knock-out"


@pytest.mark.parametrize("reason", [None, NO_TIME, f"{DEPENDS}, so the positions cannot be one call"])
def test_a_layer_that_may_be_given_its_own_output_has_to_stay_in_a_loop(made, reason):
    without = made.counterfactual("knock-out", 3.3, line=30, last_line=32)
    assert detect(layers(made, without, reason=reason)) == []


def test_a_cell_that_is_given_its_own_output_has_to_stay_in_a_loop(made):
    without = made.counterfactual("knock-out", 8.0, line=30)
    left_out = made.not_run("library-recurrence", f"{DEPENDS}, so", line=30)
    evidence = dataclasses.replace(cells(made, without), arms_not_run=(left_out,))
    assert detect(evidence) == []
    assert detect(cells(made, without))
