from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from flatout.data import RowBatches, TokenBudgetBatches
from flatout.data.batching import EpochBatches
from flatout.ground.errors import BadInput

TOKENS = 40
lengths_of_samples = st.lists(st.integers(0, TOKENS), min_size=1, max_size=60)
options = st.fixed_dictionaries(
    {
        "max_rows": st.one_of(st.none(), st.integers(1, 8)),
        "packed": st.booleans(),
        "spread": st.sampled_from([0, 0.05, 0.5]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


def ranks(lengths: list[int], num_ranks: int, **given: Any) -> list[TokenBudgetBatches]:
    return [
        TokenBudgetBatches(lengths, tokens=TOKENS, rank=rank, num_ranks=num_ranks, **given)
        for rank in range(num_ranks)
    ]


@given(lengths=lengths_of_samples, num_ranks=st.integers(1, 5), epoch=st.integers(0, 2), given=options)
def test_every_sample_once_per_epoch_over_any_number_of_ranks(
    lengths: list[int], num_ranks: int, epoch: int, given: dict[str, Any]
) -> None:
    samplers = ranks(lengths, num_ranks, **given)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    taken = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in taken}) == 1
    assert all(len(batches) == len(sampler) for batches, sampler in zip(taken, samplers, strict=True))
    counts = Counter(index for batches in taken for batch in batches for index in batch)
    assert set(counts) == set(range(len(lengths)))
    assert sum(counts.values()) - len(lengths) == samplers[0].num_repeated
    for batches in taken:
        for batch in batches:
            rows = [max(1, lengths[i]) for i in batch]
            assert rows and (sum(rows) if given["packed"] else max(rows) * len(rows)) <= TOKENS
            assert given["max_rows"] is None or len(rows) <= given["max_rows"]


@given(lengths=lengths_of_samples, num_ranks=st.integers(1, 5), given=options)
def test_nothing_is_repeated_where_batches_can_be_halved(
    lengths: list[int], num_ranks: int, given: dict[str, Any]
) -> None:
    sampler = ranks(lengths, num_ranks, **given)[0]
    needed = len(sampler) * num_ranks
    assert (sampler.num_repeated > 0) == (needed > len(lengths))


@given(lengths=lengths_of_samples, given=options)
def test_the_same_for_the_same_seed_and_epoch_and_only_for_it(
    lengths: list[int], given: dict[str, Any]
) -> None:
    one, two = (TokenBudgetBatches(lengths, tokens=TOKENS, **given) for _ in range(2))
    first, second = list(one), list(one)
    assert list(two) == first
    two.set_epoch(0)
    assert list(two) == first
    two.set_epoch(1)
    assert list(two) == second
    assert len(first) == len(second)
    if not given["shuffle"]:
        assert first == second


def test_shuffling_mixes_samples_and_batches() -> None:
    sampler = TokenBudgetBatches([10] * 400, tokens=40, seed=1)
    first, second = list(sampler), list(sampler)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}
    other = TokenBudgetBatches([10] * 400, tokens=40, seed=2)
    assert list(other) != first


def test_similar_lengths_share_a_batch() -> None:
    random = np.random.default_rng(0)
    lengths = random.lognormal(4, 1, 5000).astype(int).clip(1, 1000)
    padded = [lengths[batch] for batch in TokenBudgetBatches(lengths, tokens=4000).arrays()]
    shares = [batch.sum() / (batch.max() * len(batch)) for batch in padded]
    assert np.mean(shares) > 0.95
    assert np.mean([batch.max() * len(batch) for batch in padded]) > 0.9 * 4000
    by_rows = [lengths[batch] for batch in RowBatches(5000, rows=32).arrays()]
    assert np.mean([batch.sum() / (batch.max() * len(batch)) for batch in by_rows]) < 0.5


def test_ranks_take_similar_lengths_in_a_step() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    steps = zip(
        *(TokenBudgetBatches(lengths, tokens=4000, rank=rank, num_ranks=4).arrays() for rank in range(4)),
        strict=True,
    )
    ratios = [
        max(lengths[batch].max() for batch in step) / min(lengths[batch].max() for batch in step)
        for step in steps
    ]
    assert np.median(ratios) < 1.1


@pytest.mark.parametrize("kind", ["tokens", "rows"])
@given(
    stop=st.integers(0, 12), epoch=st.integers(0, 1), num_ranks=st.integers(1, 3), through_json=st.booleans()
)
def test_resumed_is_uninterrupted(
    kind: str, stop: int, epoch: int, num_ranks: int, through_json: bool
) -> None:
    def make() -> EpochBatches:
        if kind == "rows":
            return RowBatches(50, rows=3, seed=5, rank=0, num_ranks=num_ranks)
        return TokenBudgetBatches(np.arange(50) % 17, tokens=60, seed=5, rank=0, num_ranks=num_ranks)

    whole = make()
    expected = [batch for _ in range(3) for batch in whole]
    first = make()
    taken = [batch for _ in range(epoch) for batch in first]
    running = iter(first)
    taken += list(itertools.islice(running, stop))
    state = first.state_dict()
    second = make()
    second.load_state_dict(json.loads(json.dumps(state)) if through_json else state)
    assert second.state_dict() == state
    while len(taken) < len(expected):
        taken += list(second)
    assert taken == expected


def test_a_loop_that_sets_its_epochs_resumes_too() -> None:
    sampler = RowBatches(20, rows=2, seed=1)
    expected = list(sampler)
    twin = RowBatches(20, rows=2, seed=1)
    twin.load_state_dict(sampler.state_dict(done=4) | {"epoch": 0})
    twin.set_epoch(0)
    assert list(twin) == expected[4:]
    twin.set_epoch(0)
    assert list(twin) == expected


def test_a_state_of_other_batches_is_refused() -> None:
    state = RowBatches(20, rows=2, seed=1).state_dict()
    with pytest.raises(BadInput, match="seed is 2, the state has 1"):
        RowBatches(20, rows=2, seed=2).load_state_dict(state)
    with pytest.raises(BadInput, match="num_samples is 21"):
        RowBatches(21, rows=2, seed=1).load_state_dict(state)


def test_a_sample_longer_than_the_budget_is_named_or_alone() -> None:
    lengths = [3, 50, 4, 60]
    with pytest.raises(BadInput, match="sample 1 has 50 tokens, the budget of a batch is 40; 2 of 4"):
        TokenBudgetBatches(lengths, tokens=40)
    batches = list(TokenBudgetBatches(lengths, tokens=40, too_long="alone"))
    assert [1] in batches and [3] in batches
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "given", "message"),
    [
        ([], {}, "one whole number per sample"),
        ([1.5], {}, "one whole number per sample, not float64"),
        ([[1]], {}, "shape"),
        ([1, -2], {}, "sample 1 has a negative length, -2"),
        ([1], {"tokens": 0}, "tokens=0"),
        ([1], {"max_rows": 0}, "max_rows=0"),
        ([1], {"spread": -1}, "spread=-1"),
        ([1], {"rank": 2, "num_ranks": 2}, "rank=2 is not one of 2 ranks"),
        ([1], {"rank": 2}, "give both or neither"),
        ([1], {"too_long": "cut"}, "too_long='cut'"),
    ],
)
def test_settings_that_cannot_work_are_named(lengths: list[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TokenBudgetBatches(lengths, **{"tokens": 9, **given})


def test_very_long_and_very_different_lengths() -> None:
    lengths = [1, 10**9, 10**6, 1]
    batches = list(TokenBudgetBatches(lengths, tokens=10**9, spread=0))
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3]


def test_rows_fill_batches_and_the_last_may_be_dropped() -> None:
    assert [len(batch) for batch in RowBatches(10, rows=4, shuffle=False)] == [4, 4, 2]
    dropped = RowBatches(10, rows=4, drop_last=True)
    assert [len(batch) for batch in dropped] == [4, 4] and dropped.num_repeated == 0
    halves = [list(RowBatches(10, rows=4, drop_last=True, rank=rank, num_ranks=2)) for rank in (0, 1)]
    assert [len(batches) for batches in halves] == [1, 1]
    with pytest.raises(BadInput, match="3 samples do not fill one batch of 2 on each of 2 ranks"):
        RowBatches(3, rows=2, drop_last=True, rank=0, num_ranks=2)
    with pytest.raises(BadInput, match="rows=0"):
        RowBatches(3, rows=0)


def test_as_the_batch_sampler_of_a_loader() -> None:
    sampler = TokenBudgetBatches([1, 2, 3, 4, 5], tokens=6)
    loader: Any = DataLoader(list(range(5)), batch_sampler=sampler)  # type: ignore[arg-type]
    seen = [index for batch in loader for index in batch.tolist()]
    assert sorted(seen) == [0, 1, 2, 3, 4] and len(loader) == len(sampler)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_resumes_in_the_middle(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        sampler = TokenBudgetBatches(np.arange(100) % 13, tokens=30, seed=3)
        return stateful.StatefulDataLoader(list(range(100)), batch_sampler=sampler, num_workers=workers)

    expected = [batch.tolist() for batch in make()]
    first = make()
    taken = [batch.tolist() for batch in itertools.islice(first, 5)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert taken + [batch.tolist() for batch in second] == expected
