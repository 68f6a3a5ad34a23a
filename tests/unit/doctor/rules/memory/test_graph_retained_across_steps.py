from __future__ import annotations

import dataclasses

from flatout.doctor.rules.memory.graph_retained_across_steps import detect
from flatout.measure.evidence import GraphGrowth, Growth, Memory

MIB = 2**20


def growth(made, *, line=30, holder=None, held_at=None, num_bytes=MIB, tensors=1.0, with_graph=True):
    return Growth(
        place=made.place(line),
        holder=holder,
        holder_place=None if held_at is None else made.place(held_at),
        bytes_per_step=num_bytes,
        tensors_per_step=tensors,
        with_graph=with_graph,
    )


def graph(made, *, held_at=70, nodes=40.0, holder="losses"):
    return GraphGrowth(
        holder=holder, holder_place=None if held_at is None else made.place(held_at), nodes_per_step=nodes
    )


def growing(made, *, growths=(), graphs=(), device="cpu"):
    memory = Memory(
        num_steps=4,
        peak_bytes=40 * 2**30,
        growth_bytes_per_step=2.0**30,
        growth=tuple(growths),
        graphs=tuple(graphs),
    )
    return made.evidence(device=device, memory=memory)


def test_fires_at_the_line_that_holds_the_graph(made):
    (finding,) = detect(growing(made, graphs=[graph(made)]))
    assert (finding.code, finding.name) == ("FO501", "graph-retained-across-steps")
    assert finding.place.line == 70
    assert "losses" in finding.message
    assert "40 nodes" in finding.message
    assert finding.share is None
    assert finding.ceiling is None


def test_tensors_that_hold_graphs_fire_at_their_holder(made):
    (finding,) = detect(growing(made, growths=[growth(made, held_at=71, holder="total")]))
    assert finding.place.line == 71
    assert "1.00 MiB" in finding.message


def test_the_same_holder_is_one_finding(made):
    job = growing(made, graphs=[graph(made)], growths=[growth(made, held_at=70, holder="losses")])
    (finding,) = detect(job)
    assert any("1.00 MiB" in figure for figure in finding.evidence)


def test_the_activations_that_are_kept_alive_are_not_blamed(made):
    victims = [growth(made, line=line, num_bytes=100 * MIB) for line in (31, 32, 33)]
    (finding,) = detect(growing(made, graphs=[graph(made)], growths=victims))
    assert finding.place.line == 70


def test_without_a_known_holder_the_largest_growth_speaks_for_all(made):
    job = growing(made, growths=[growth(made, line=31), growth(made, line=32, num_bytes=2 * MIB)])
    (finding,) = detect(job)
    assert finding.place.line == 32


def test_a_graph_of_unknown_place_is_still_reported(made):
    (finding,) = detect(growing(made, graphs=[graph(made, held_at=None, holder=None)]))
    assert finding.place is None


def test_on_a_gpu_the_end_is_foreseen(made):
    (finding,) = detect(growing(made, graphs=[graph(made)], device="cuda"))
    assert any("full in 100 steps" in figure for figure in finding.evidence)


def test_look_alikes(made):
    assert detect(made.evidence()) == []
    assert detect(growing(made)) == []
    replay_buffer = growth(made, held_at=72, holder="replay", with_graph=False)
    assert detect(growing(made, growths=[replay_buffer])) == []
    assert detect(growing(made, graphs=[graph(made, nodes=0.5)])) == []
    assert detect(growing(made, graphs=[graph(made, nodes=0.0)])) == []
    assert detect(growing(made, growths=[growth(made, held_at=70, tensors=0.25)])) == []
    assert detect(growing(made, growths=[growth(made, held_at=70, num_bytes=0.0)])) == []


def test_tensors_that_do_not_grow_are_not_counted(made):
    job = growing(made, graphs=[graph(made)])
    still = dataclasses.replace(job, memory=dataclasses.replace(job.memory, growth_bytes_per_step=0.0))
    for evidence, grows in ((job, True), (still, False)):
        (finding,) = detect(evidence)
        assert any("all live tensors grow" in figure for figure in finding.evidence) is grows
