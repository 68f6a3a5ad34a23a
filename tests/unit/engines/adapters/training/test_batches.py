"""Batches are a function of their number, keep to their budget, and are what the task would collate."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.adapters.tasks.known import task_named
from flatout.engines.adapters.tasks.task import IGNORED, AdapterTask, Example, TaskBatch, encode_all
from flatout.engines.adapters.training.batches import (
    TaskRows,
    TrainingBatches,
    cut_by_length,
    evaluation_batches,
    num_targets,
    select_rows,
)
from flatout.ground.errors import BadInput
from tests.support.adapters import tiny_tokenizer

CPU = torch.device("cpu")
LONGEST = 96


def examples_of(task: AdapterTask, count: int = 30) -> list[Example]:
    records = task.generated(count, seed=0)
    return encode_all(task, records, tiny_tokenizer(), max_length=LONGEST, training=True)[0]


def rows_of(name: str, *, count: int = 30, adapter: int = 0, tokens: int = 400, **changes: Any) -> TaskRows:
    task = task_named(name)
    return TaskRows(
        task,
        examples_of(task, count),
        name=name,
        adapter=adapter,
        tokens=tokens,
        num_buckets=3,
        pad_id=0,
        seed=7,
        device=CPU,
        **changes,
    )


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=60), num_buckets=st.integers(1, 6))
def test_every_example_is_in_one_bucket_of_its_length(lengths: list[int], num_buckets: int) -> None:
    cut = cut_by_length(np.array(lengths), num_buckets=num_buckets, seed=[0])
    assert sorted(place for group in cut for place in group) == list(range(len(lengths)))
    assert 1 <= len(cut) <= num_buckets
    bounds = [
        (min(lengths[place] for place in group), max(lengths[place] for place in group)) for group in cut
    ]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


def test_a_file_sorted_by_class_gives_buckets_of_every_class() -> None:
    classes = np.repeat(np.arange(5), 64)
    for group in cut_by_length(np.full(len(classes), 12), num_buckets=4, seed=[0, 7]):
        assert np.bincount(classes[group], minlength=5).min() >= 4


@pytest.mark.parametrize("name", ["sentiment", "qa", "translation", "summarisation", "code"])
def test_a_selected_batch_is_what_the_task_would_collate(name: str) -> None:
    """So that a selection made on the device cannot drift from what the task means."""
    rows = rows_of(name, tokens=600)
    task = task_named(name)
    for number, bucket in enumerate(rows.buckets):
        assert bucket.by_row
        on_host, _ = rows.places(number, visit=2)
        found = rows.batch(number, visit=2)
        meant = task.collate(
            [bucket.whole.examples[place] for place in on_host], adapter=0, pad_id=0, length_multiple=8
        )
        assert float(found.count) == float(meant.count) > 0
        assert found.block.lengths.equal(meant.block.lengths)
        assert found.block.ids[:, : meant.block.length].equal(meant.block.ids)
        assert found.block.length == bucket.whole.block.length
        assert found.targets.keys() == meant.targets.keys()
        if "labels" in meant.targets:
            assert _list_targets(found) == _list_targets(meant)
        else:
            for key, values in meant.targets.items():
                there = found.targets[key]
                assert (there[:, : values.shape[1]] if values.ndim == 2 else there).equal(values)


def _list_targets(batch: TaskBatch) -> list[tuple[int, int, int]]:
    """(row, place in the target, token) of everything that is to be named."""
    width = batch.targets["ids"].shape[1]
    pairs = zip(batch.targets["places"].tolist(), batch.targets["labels"].tolist(), strict=True)
    return [(*divmod(place, width), label) for place, label in pairs if label != IGNORED]


def test_room_for_targets_that_is_left_has_none() -> None:
    rows = rows_of("translation", tokens=600)
    bucket = rows.buckets[0]
    on_host, places = rows.places(0, visit=0)
    needed = int(bucket.written[on_host].sum())
    exact, roomy = (select_rows(bucket, places, num_places=needed + more) for more in (0, 13))
    assert _list_targets(exact) == _list_targets(roomy)
    assert (roomy.targets["labels"] == IGNORED).sum() == 13
    assert float(num_targets(roomy.targets)) == needed


@pytest.mark.parametrize("name", ["sentiment", "translation"])
def test_a_batch_keeps_to_its_budget_with_its_targets(name: str) -> None:
    rows = rows_of(name, tokens=400)
    for number in range(len(rows.buckets)):
        batch = rows.batch(number, visit=0)
        written = batch.targets["ids"].shape[1] if "ids" in batch.targets else 0
        assert batch.block.num_rows * (batch.block.length + written) <= 400 + 8 * batch.block.num_rows


def test_rows_go_round_and_every_one_comes_as_often() -> None:
    rows = rows_of("sentiment", tokens=400)
    for number, bucket in enumerate(rows.buckets):
        visits = len(bucket)  # so many batches hold every row `bucket.rows` times
        seen = Counter(place for visit in range(visits) for place in rows.places(number, visit=visit)[0])
        assert set(seen.values()) == {bucket.rows} and len(seen) == len(bucket)


def test_a_batch_is_a_function_of_its_number() -> None:
    made = [
        TrainingBatches(
            {"translation": rows_of("translation", adapter=1), "sentiment": rows_of("sentiment", adapter=0)},
            seed=3,
        )
        for _ in range(2)
    ]
    one = [made[0].at(number, tasks=("sentiment", "translation")) for number in range(8)]
    # Another process begins in the middle, and asks for other tasks before.
    made[1].at(11, tasks=("sentiment",))
    for number in (7, 4, 5):
        again = made[1].at(number, tasks=("sentiment", "translation"))
        assert [batch.block.adapter for batch in again] == [0, 1]
        for left, right in zip(one[number], again, strict=True):
            assert left.block.ids.equal(right.block.ids)
            assert left.count.equal(right.count)


def test_shapes_of_whole_steps_are_as_few_as_buckets() -> None:
    batches = TrainingBatches(
        {name: rows_of(name, adapter=number) for number, name in enumerate(("sentiment", "qa"))}, seed=0
    )
    shapes = {
        tuple(batch.block.ids.shape for batch in batches.at(number, tasks=("sentiment", "qa")))
        for number in range(30)
    }
    assert 1 < len(shapes) <= 3


def test_a_task_with_fewer_buckets_takes_turns() -> None:
    few = rows_of("sentiment", count=30)
    few.buckets = few.buckets[:2]
    batches = TrainingBatches({"sentiment": few, "qa": rows_of("qa", adapter=1)}, seed=0)
    visits = [
        (bucket, visit)
        for number in range(30)
        for rows, bucket, visit in batches.where(number, tasks=("sentiment",))
    ]
    assert len(set(visits)) == 30
    for bucket in (0, 1):
        own = sorted(visit for each, visit in visits if each == bucket)
        assert own == list(range(len(own)))


def test_what_cannot_be_batched_is_said() -> None:
    with pytest.raises(BadInput, match="tokens=16 of sentiment hold no row"):
        rows_of("sentiment", tokens=16)
    with pytest.raises(BadInput, match="no example"):
        rows_of("sentiment", count=0)


def test_a_task_whose_targets_are_not_by_row_is_collated_each_time() -> None:
    rows = rows_of("sentiment")
    task = task_named("sentiment")
    collate = task.collate

    class Odd(type(task)):  # type: ignore[misc]
        def collate(self, examples: Any, **given: Any) -> TaskBatch:
            made = collate(examples, **given)
            return TaskBatch(
                block=made.block,
                targets={**made.targets, "odd": torch.arange(3)},
                count=made.count,
                examples=made.examples,
            )

    odd = TaskRows(
        Odd(),
        examples_of(task),
        name="sentiment",
        adapter=0,
        tokens=400,
        num_buckets=3,
        pad_id=0,
        seed=7,
        device=CPU,
    )
    assert not odd.buckets[0].by_row
    left, right = odd.batch(0, visit=1), rows.batch(0, visit=1)
    assert left.targets["label"].equal(right.targets["label"])


def test_evaluation_takes_every_example_once_within_the_budget() -> None:
    task = task_named("qa")
    examples = examples_of(task)
    batches = list(evaluation_batches(task, examples, adapter=2, tokens=400, pad_id=0, device=CPU))
    assert sorted(index for batch in batches for index in batch.indices) == sorted(
        example.index for example in examples
    )
    assert all(batch.block.num_tokens <= 400 and batch.block.adapter == 2 for batch in batches)
