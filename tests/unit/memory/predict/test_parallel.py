from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.predict.forecast import Forecaster
from flatout.memory.predict.fsdp_units import ShardUnit, units_of
from flatout.memory.predict.parallel import bucket_sizes, with_ddp, with_fsdp2
from flatout.memory.trace.record import Trace
from tests.support import memory_ranks as ranks
from tests.support.memory import layered_step
from tests.support.warm_python import warm

MIB = 2**20


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0 of two really held, over gloo on the CPU."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    done = warm().run("python", "-W", "ignore", ranks.__file__, store)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def traced(frozen: bool = False, accumulation: int = 1) -> Trace:
    job = Job(
        name="ranks",
        make_model=ranks.PartlyFrozen if frozen else ranks.Model,
        make_batch=ranks.make_batch,
        loss=ranks.loss,
    )
    return Forecaster(job).trace(Recipe(accumulation=accumulation), {"batch_size": ranks.BATCH})


def units(frozen: bool = False) -> tuple[ShardUnit, ...]:
    return units_of(ranks.PartlyFrozen() if frozen else ranks.Model())


def series(trace: Trace) -> Any:
    """Bytes in use after each event, without workspaces, which the CPU has none of."""
    sizes = np.array([0 if each.component == "workspaces" else each.num_bytes for each in trace.storages])
    births = trace.events >= 0
    return np.cumsum(np.where(births, 1, -1) * sizes[np.where(births, trace.events, ~trace.events)])


def step_bytes(trace: Trace) -> int:
    """The most bytes above those at its start that forward and backward of a later step take."""
    marks = [(at, phase) for at, step, phase in trace.marks if step == "next"]
    forward = [at for at, phase in marks if phase == "forward"][-1]
    (optimizer,) = [at for at, phase in marks if phase == "optimizer"]
    held = series(trace)
    return int(held[forward:optimizer].max() - held[forward - 1])


def check_lives(trace: Trace) -> None:
    """Every storage is born once, dies at most once, and in this order; marks are in order."""
    alive: set[int] = set()
    seen: set[int] = set()
    for event in trace.events.tolist():
        if event >= 0:
            assert event not in seen
            seen.add(event)
            alive.add(event)
        else:
            alive.remove(~event)
    assert seen == set(range(len(trace.storages)))
    assert list(trace.marks) == sorted(trace.marks, key=lambda mark: mark[0])


def held_of(trace: Trace, *components: str) -> int:
    """Bytes of these components that are alive when the trace ends."""
    dead = {~event for event in trace.events.tolist() if event < 0}
    return sum(
        each.num_bytes
        for number, each in enumerate(trace.storages)
        if number not in dead and each.component in components
    )


# DDP


@given(sizes=st.lists(st.integers(1, 100), max_size=30), first=st.integers(1, 200), rest=st.integers(1, 200))
def test_buckets_hold_every_gradient_and_close_at_their_limit(
    sizes: list[int], first: int, rest: int
) -> None:
    found = bucket_sizes(sizes, limits=[first, rest])
    assert sum(found) == sum(sizes)
    for number, num_bytes in enumerate(found[:-1]):
        limit = rest if number else first
        assert limit <= num_bytes < limit + 100


def test_buckets_are_those_of_a_real_reducer(measured: Any) -> None:
    real = measured["ddp"]
    limit = real["bucket_bytes"]
    made = with_ddp(traced(), bucket_bytes=limit, first_bucket_bytes=limit)
    buckets = [each.num_bytes for each in made.storages if each.op == "DDP bucket"]
    assert buckets == [*real["bucket_sizes"], *real["rebuilt_bucket_sizes"]]
    assert len(real["rebuilt_bucket_sizes"]) > 3


def test_a_step_under_ddp_takes_what_it_really_takes(measured: Any) -> None:
    assert step_bytes(with_ddp(traced())) == pytest.approx(measured["ddp"]["step_bytes"], rel=1e-3)


def test_ddp_holds_gradients_twice() -> None:
    plain = layered_step()
    assert held_of(with_ddp(plain), "gradients") == 2 * held_of(plain, "gradients")


def test_the_broadcast_at_construction_is_gone_before_the_first_step() -> None:
    made = with_ddp(layered_step())
    check_lives(made)
    copies = [number for number, each in enumerate(made.storages) if each.op == "DDP broadcast"]
    (start, *_) = [at for at, _step, _phase in made.marks]
    assert copies
    before = made.events[:start].tolist()
    assert all(copy in before and ~copy in before for copy in copies)


def test_ddp_with_accumulation_keeps_one_copy_more() -> None:
    plain = traced(accumulation=2)
    made = with_ddp(plain)
    check_lives(made)
    assert held_of(made, "gradients") == 2 * held_of(plain, "gradients")


# FSDP2


@pytest.mark.parametrize(("name", "frozen"), [("fsdp2", False), ("fsdp2 partly frozen", True)])
def test_shards_are_those_of_a_real_rank(measured: Any, name: str, frozen: bool) -> None:
    made = with_fsdp2(traced(frozen), ranks=2, units=units(frozen))
    check_lives(made)
    real = measured[name]
    assert held_of(made, "parameters") == sum(real["parameters"])
    assert held_of(made, "optimizer state") == sum(real["states"])
    assert held_of(made, "gradients") == sum(real["gradients"])
    shards = [each.num_bytes for each in made.storages if each.op == "FSDP reduce-scatter"]
    assert set(real["gradients"]) <= set(shards)


@pytest.mark.parametrize(("name", "frozen"), [("fsdp2", False), ("fsdp2 partly frozen", True)])
def test_a_step_under_fsdp2_takes_what_it_really_takes(measured: Any, name: str, frozen: bool) -> None:
    made = with_fsdp2(traced(frozen), ranks=2, units=units(frozen))
    assert step_bytes(made) == pytest.approx(measured[name]["step_bytes"], rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_more_ranks_hold_less_but_never_less_than_their_part(num_ranks: int) -> None:
    plain = traced()
    made = with_fsdp2(plain, ranks=num_ranks, units=units())
    check_lives(made)
    for component in ("parameters", "optimizer state", "gradients"):
        whole, part = held_of(plain, component), held_of(made, component)
        assert whole / num_ranks <= part < whole
    assert held_of(made, "activations", "temporaries") == held_of(plain, "activations", "temporaries")


def test_nothing_gathered_outlives_its_step() -> None:
    made = with_fsdp2(traced(), ranks=2, units=units())
    dead = {~event for event in made.events.tolist() if event < 0}
    gathered = {number for number, each in enumerate(made.storages) if each.op == "FSDP all-gather"}
    assert gathered and gathered <= dead


def test_one_rank_changes_nothing() -> None:
    assert with_fsdp2(traced(), ranks=1, units=units()) is traced()


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(BadInput, match="one micro-batch"):
        with_fsdp2(traced(accumulation=2), ranks=2, units=units())
    with pytest.raises(BadInput, match="the units hold"):
        with_fsdp2(traced(), ranks=2, units=units()[:1])
