"""Two traces are the same step, or the first difference is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flatout.errors import StructureChanges
from flatout.memory.predict.structure import compare
from flatout.memory.trace.record import Trace
from tests.support.memory import TraceBuilder, layered_step


def small(*, op: str = "aten.mm.default", deaths: tuple[int, ...] = (0, 1), extra: bool = False) -> Trace:
    build = TraceBuilder()
    build.mark("first", "forward")
    for name in (op, "aten.add.Tensor"):
        build.birth(1024, "activations", name, "encoder.0")
    for storage in deaths:
        build.death(storage)
    build.birth(1024, "temporaries", "aten.relu.default")
    if extra:
        build.birth(1024, "temporaries", "aten.sort.default", "loss")
    return build.trace(batch_size=3 if extra else 2)


def test_the_same_step_at_other_sizes_is_the_same() -> None:
    compare(layered_step(batch_size=2), layered_step(batch_size=9, length=640))


def test_the_order_of_deaths_between_two_births_is_free() -> None:
    compare(small(deaths=(0, 1)), small(deaths=(1, 0)))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            small(op="aten.bmm.default"),
            r"storage 0 \(aten.mm.default of encoder.0, .* is storage 0 \(aten.bmm",
        ),
        (small(deaths=(0,)), r"is freed elsewhere"),
        (small(deaths=()), r"storage . .* is freed elsewhere"),
        (small(extra=True), r"storage 3 \(aten.sort.default of loss, forward\) is born in one of them only"),
        (replace(small(), marks=((1, "first", "forward"),)), "the phases of the step begin at other events"),
    ],
)
def test_the_first_difference_is_named(other: Trace, difference: str) -> None:
    for one, two in ((small(), other), (other, small())):
        with pytest.raises(StructureChanges) as raised:
            compare(one, two)
        assert "allocates otherwise at batch_size=" in raised.value.message
        assert raised.value.hint == "trace it at the sizes asked for"
    with pytest.raises(StructureChanges, match=difference):
        compare(small(), other)


def test_a_death_after_another_birth_is_a_difference() -> None:
    one = small()
    events = one.events.copy()
    events[[-1, -2]] = events[[-2, -1]]
    with pytest.raises(StructureChanges, match="freed elsewhere"):
        compare(one, replace(one, events=np.array(events)))
