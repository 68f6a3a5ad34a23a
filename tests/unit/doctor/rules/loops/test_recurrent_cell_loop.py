from __future__ import annotations

import pytest

from flatout.doctor.rules.loops.recurrent_cell_loop import detect

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
