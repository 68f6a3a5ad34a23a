from __future__ import annotations

import dataclasses

import pytest

from flatout.ground.errors import BadInput
from flatout.memory.predict.trace_edit import Edit, gradients_of, steps_of
from tests.support.memory import TraceBuilder, layered_step


def test_an_edit_without_changes_gives_the_same_trace() -> None:
    plain = layered_step()
    same = Edit(plain).trace()
    assert same.events.tolist() == plain.events.tolist()
    assert same.storages == plain.storages and same.marks == plain.marks


def test_events_go_before_or_after_the_mark() -> None:
    build = TraceBuilder()
    first = build.birth(8, "parameters", "parameter")
    build.mark("first", "forward")
    second = build.birth(8, "activations", "aten.mm")
    edit = Edit(build.trace(batch_size=1))
    held = edit.storage(512, "gradients", "setup", "bucket")
    late = edit.storage(512, "temporaries", "forward", "copy", "layers.0")
    edit.before[1] += [held]
    edit.after[1] += [late]
    edit.before[2] += [~late]
    made = edit.trace()
    assert made.events.tolist() == [first, held, late, second, ~late]
    assert made.marks == ((2, "first", "forward"),)
    assert made.storages[late].module == "layers.0" and made.storages[held].module is None


def test_a_death_can_be_dropped_and_a_storage_resized() -> None:
    build = TraceBuilder()
    build.mark("first", "forward")
    moved, other = build.birth(8, "gradients", "gradient"), build.birth(8, "activations", "aten.mm")
    build.death(moved)
    edit = Edit(build.trace(batch_size=1))
    edit.drop_death(moved)
    edit.resize(other, 4)
    made = edit.trace()
    assert made.events.tolist() == [moved, other]
    assert made.storages[other].num_bytes == 4


def test_steps_and_their_gradients_are_found() -> None:
    plain = layered_step(num_layers=3)
    steps = steps_of(plain)
    assert [step.num_backwards for step in steps] == [1, 1]
    assert steps[0].start == steps[0].forward < steps[0].backward < steps[0].optimizer < steps[1].start
    assert all(len(gradients_of(plain, step)) == 3 for step in steps)


def test_a_trace_without_training_is_refused() -> None:
    plain = layered_step()
    with pytest.raises(BadInput, match="no step"):
        steps_of(dataclasses.replace(plain, marks=()))
    with pytest.raises(BadInput, match="training steps"):
        steps_of(dataclasses.replace(plain, marks=plain.marks[:1]))
