from __future__ import annotations

from flatout.doctor.rules.compilation.graph_breaks import detect
from flatout.measure.evidence import Compilation, GraphBreak, Step


def test_each_line_is_one_finding_with_its_reasons(made):
    breaks = (
        GraphBreak(place=made.place(12), reason="a branch depends on a tensor's value", times=1),
        GraphBreak(place=made.place(14), reason="print cannot be traced", times=2),
        GraphBreak(place=made.place(12), reason="item cannot be traced", times=3),
    )
    found = Compilation(functions=(), breaks=breaks, num_steps=4, steps_s=1.0)
    first, second = detect(made.evidence(compilation=found))
    assert (first.code, first.name, first.place) == ("FO602", "graph-breaks", made.place(12))
    assert first.message == "a compiled graph ends here: item cannot be traced"
    assert len(first.evidence) == 2
    assert second.place == made.place(14)
    assert (first.share, first.ceiling) == (None, None) and first.no_ceiling


def test_whole_graphs_are_no_finding(made):
    found = Compilation(functions=(), breaks=(), num_steps=4, steps_s=1.0)
    assert detect(made.evidence(compilation=found)) == []
    assert detect(made.evidence()) == []


def test_behind_a_slow_loader_one_graph_would_wait_as_long(made):
    breaks = (GraphBreak(place=made.place(12), reason="print cannot be traced", times=2),)
    found = Compilation(functions=(), breaks=breaks, num_steps=4, steps_s=1.0)
    phases = {"wait": 0.095, "forward": 0.003, "backward": 0.002}
    waits = Step(index=0, arm="real", block=0, step_s=0.1, phases_s=phases)
    assert detect(made.evidence(compilation=found, steps=(waits,))) == []
