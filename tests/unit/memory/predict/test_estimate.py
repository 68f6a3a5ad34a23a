"""What an estimate says adds up, holds the peak, and reads well."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.decisions import Decision
from flatout.hardware.simulated import simulated_device
from flatout.memory.predict.allocator import simulate
from flatout.memory.predict.estimate import FORMAT, MAX_POINTS, MemoryEstimate, WorkspaceBytes, estimate
from flatout.memory.predict.replay import fit_replay, with_own_sizes
from flatout.memory.predict.samples import sample_sizes
from flatout.memory.trace.record import COMPONENTS, Guess, Trace
from tests.support.memory import TraceBuilder, layered_step

MIB = 2**20


@given(st.integers(1, 60), st.integers(1, 10))
def test_the_components_add_up_to_the_peak(batch_size: int, num_layers: int) -> None:
    found = estimate(layered_step(batch_size=batch_size, num_layers=num_layers))
    assert sum(found.by_component.values()) == found.peak_allocated_bytes
    assert max(found.by_phase.values()) == found.peak_allocated_bytes
    assert found.by_phase[found.peak_phase] == found.peak_allocated_bytes
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes
    assert tuple(found.by_component) == COMPONENTS


@given(st.integers(1, 40), st.integers(1, 120))
def test_the_timeline_is_thin_and_holds_the_peak(batch_size: int, num_layers: int) -> None:
    found = estimate(layered_step(batch_size=batch_size, num_layers=num_layers, width=64))
    timeline = found.timeline
    assert len(timeline.events) <= MAX_POINTS
    assert timeline.events[0] == 0
    assert sorted(set(timeline.events)) == list(timeline.events)
    assert timeline.peak is not None
    assert max(timeline.total_bytes()) == found.peak_allocated_bytes
    assert timeline.total_bytes()[timeline.peak] == found.peak_allocated_bytes
    assert [phase for _at, phase in timeline.phases] == ["forward", "backward", "optimizer"]


def test_it_is_what_the_allocator_does() -> None:
    step = with_own_sizes(layered_step(batch_size=24))
    done = simulate(step.trace.events, step.num_bytes)
    found = estimate(step)
    assert found.peak_allocated_bytes == done.peak_allocated_bytes
    assert found.peak_reserved_bytes == done.peak_reserved_bytes
    assert found.fits is None


def test_the_source_of_the_workspaces_is_kept() -> None:
    measured: WorkspaceBytes = Decision(value=(4 * MIB,), reason="a probe on this GPU", source="measured")
    assert estimate(layered_step(), workspaces=measured).workspaces == measured


def test_the_peak_names_its_operation_phase_and_module() -> None:
    build = TraceBuilder()
    build.birth(MIB, "parameters", "parameter", "head")
    for step in ("first", "next"):
        build.mark(step, "forward")
        kept = build.birth(MIB, "activations", "aten.mm.default", "head")
        build.mark(step, "backward")
        large = build.birth(4 * MIB, "temporaries", "aten.sort.default", "head.loss")
        build.death(large)
        build.death(kept)
    found = estimate(build.trace(batch_size=1))
    assert (found.peak_op, found.peak_module) == ("aten.sort.default", "head.loss")
    assert (found.peak_phase, found.peak_step) == ("backward", "next")
    assert found.by_component["temporaries"] == 4 * MIB


def test_a_peak_of_the_first_step_alone_is_shown_in_the_first_step() -> None:
    build = TraceBuilder()
    for step, num_bytes in (("first", 8 * MIB), ("next", 2 * MIB)):
        build.mark(step, "forward")
        build.death(build.birth(num_bytes, "temporaries", "aten.mm.default"))
    found = estimate(build.trace(batch_size=1))
    assert found.peak_step == found.timeline.step == "first"
    assert max(found.timeline.total_bytes()) == found.peak_allocated_bytes


def test_what_is_reserved_is_what_a_run_of_steps_settles_at() -> None:
    """The holes that the second step leaves are those of its gradients, and too small for the third."""
    build = TraceBuilder()
    left: list[int] = []
    for step in ("first", "next"):
        build.mark(step, "forward")
        for gradient in left:
            build.death(gradient)
        held = [build.birth(size * MIB, "activations", "aten.mm.default") for size in (2, 12)]
        left = []
        for activation, size in zip(reversed(held), (12, 15), strict=True):
            left.append(build.birth(size * MIB, "gradients", "gradient"))
            build.death(activation)
    trace = build.trace(batch_size=1)
    assert with_own_sizes(trace).simulate().peak_reserved_bytes == 44 * MIB
    found = estimate(trace, context_bytes=MIB)
    assert found.peak_reserved_bytes == 60 * MIB
    assert found.process_bytes == 61 * MIB


def test_the_process_takes_the_context_on_top() -> None:
    found = estimate(layered_step(), context_bytes=400 * MIB)
    assert found.process_bytes == found.peak_reserved_bytes + 400 * MIB
    assert estimate(layered_step()).process_bytes is None


def test_a_replayed_step_says_where_it_comes_from() -> None:
    replay = fit_replay([layered_step(**s) for s in sample_sizes(dict(layered_step().sizes))])
    found = estimate(replay.at(batch_size=50), precision="bf16", device=simulated_device("A100-80GB"))
    assert found.sizes["batch_size"] == 50
    assert found.traced_at["batch_size"] == 5
    fresh = estimate(layered_step(batch_size=50))
    assert (found.peak_allocated_bytes, found.by_component) == (
        fresh.peak_allocated_bytes,
        fresh.by_component,
    )


def test_it_reads_as_a_table() -> None:
    found = estimate(
        layered_step(batch_size=8),
        context_bytes=300 * MIB,
        precision="bf16",
        device=simulated_device("A100-80GB"),
    )
    lines = str(found).splitlines()
    assert lines[0] == "batch_size=8 length=128 negatives=2, bf16, A100-SXM4-80GB"
    assert lines[1].startswith("allocated ") and " at the peak: " in lines[1]
    assert lines[3].endswith("with 300 MiB of CUDA context")
    assert any(line.startswith("activations ") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_guesses_are_said() -> None:
    guess = Guess(op="aten.nonzero.default", module="experts", answer="all of them")
    trace = layered_step()
    with_guess = Trace(
        sizes=trace.sizes,
        storages=trace.storages,
        events=trace.events,
        marks=trace.marks,
        guesses=(guess,),
    )
    assert "guessed, because it depends on data (experts): all of them" in str(estimate(with_guess))


def test_json_is_versioned_and_plain() -> None:
    found = estimate(layered_step())
    data = json.loads(json.dumps(found.to_json()))
    assert (data["format"], data["version"]) == (FORMAT, 1)
    assert data["by_component"] == found.by_component
    assert data["workspaces"]["source"] == "computed"
    assert set(MemoryEstimate.__dataclass_fields__) <= set(data)


def test_an_empty_trace_is_an_empty_estimate() -> None:
    found = estimate(TraceBuilder().trace(batch_size=1))
    assert found.peak_allocated_bytes == 0
    assert str(found)
