"""Cutting an extraction into batches, sharing beginnings, and going on after an out-of-memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.engines.steering.extract.batches import (
    CPU_READING_TOKENS,
    READING_TOKENS,
    BatchRunner,
    Work,
    forks_pay,
    plan_work,
)
from flatout.engines.steering.extract.layer_reader import Fork
from flatout.ground.decisions import Decision
from flatout.ground.errors import BatchDoesNotFit

SEQUENCES = ((1, 2, 3, 4), (1, 2, 3, 5, 6), (7, 8), (9,))
LAST = [(len(tokens) - 1, len(tokens)) for tokens in SEQUENCES]


def plan(**changes: Any) -> list[Work]:
    return plan_work(
        **{"missing": range(4), "sequences": SEQUENCES, "ranges": LAST, "pairs": [(0, 1), (2, 3)], **changes}
    )


def test_pairs_that_begin_alike_are_forks_and_the_rest_single() -> None:
    fork, *singles = plan()
    assert (fork.numbers, fork.prefix, fork.saved, fork.cost) == ((0, 1), 3, 3, 3 + 2 * 2)
    assert fork.fork() == Fork(prefix=(1, 2, 3), endings=((4,), (5, 6)), ranges=((3, 4), (4, 5)))
    assert [one.numbers for one in singles] == [(2,), (3,)]


def test_what_is_wanted_never_lies_in_the_shared_part() -> None:
    (fork, *_) = plan(ranges=[(2, 3), (2, 3), (0, 1), (0, 1)])
    assert fork.prefix == 2
    assert all(not one.prefix for one in plan(ranges=[(0, len(tokens)) for tokens in SEQUENCES]))


def test_a_text_that_is_the_beginning_of_the_other_keeps_its_last_token() -> None:
    tokens = ((1, 2, 3), (1, 2, 3, 4))
    (fork,) = plan_work(range(2), sequences=tokens, ranges=[(2, 3), (3, 4)], pairs=[(0, 1)])
    assert fork.fork().endings == ((3,), (3, 4))


def test_a_pair_of_which_one_is_known_or_taken_is_no_fork() -> None:
    assert [one.numbers for one in plan(missing=[1, 2])] == [(1,), (2,)]
    assert [one.numbers for one in plan(pairs=[(0, 0), (0, 1), (1, 0)])] == [(0, 1), (2,), (3,)]


def test_sharing_pays_where_it_saves_more_than_a_short_pass_costs() -> None:
    def pairs(prompt: int) -> list[Work]:
        tokens = ((*range(prompt), 1), (*range(prompt), 2))
        return plan_work([0, 1], sequences=tokens, ranges=[(prompt, prompt + 1)] * 2, pairs=[(0, 1)])

    def pay(
        work: list[Work], *, device: str = "cuda", able: bool = True, num_weights: int = 8_000_000_000
    ) -> Decision[bool]:
        return forks_pay(
            work,
            batch_tokens=4096,
            device=torch.device(device),
            num_weights=num_weights,
            able=lambda: able,
        )

    few, many = pairs(READING_TOKENS + 2), pairs(READING_TOKENS + 3)
    assert not pay(few).value
    pays = pay(many)
    assert pays.value
    assert "259 of 520 tokens are shared; 1 more passes cost as much as 258" in pays.reason
    assert not pay(many, num_weights=135_000_000).value  # the host is the slower one
    assert pay(pairs(400), num_weights=135_000_000).value
    assert not pay(many, able=False).value
    assert not pay(plan(pairs=[])).value
    assert pay([]).reason == "no text is left to compute"
    assert pay(pairs(CPU_READING_TOKENS + 1), device="cpu").value
    assert not pay(pairs(CPU_READING_TOKENS), device="cpu").value


class Short:
    """Memory for so many columns at once; what it reads of a sequence is its first token."""

    device = torch.device("cpu")

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.batches: list[int] = []

    def read(self, sequences: Sequence[Any], *, ranges: Sequence[Any]) -> Tensor:
        self._take(len(sequences) * max(map(len, sequences)))
        return torch.tensor([[[float(tokens[0])]] for tokens in sequences])

    def read_forks(self, forks: Sequence[Fork]) -> Tensor:
        self._take(sum(len(fork.prefix) + sum(map(len, fork.endings)) for fork in forks))
        return torch.tensor([[[float(fork.prefix[0])]] for fork in forks for _ in fork.endings])

    def _take(self, columns: int) -> None:
        self.batches.append(columns)
        if columns > self.columns:
            raise torch.OutOfMemoryError(f"tried to hold {columns} columns")


def run(reader: Any, work: Sequence[Work], *, batch_tokens: int) -> dict[int, float]:
    found: dict[int, float] = {}

    def take(numbers: Sequence[int], values: Tensor) -> None:
        assert not found.keys() & set(numbers)  # nothing is computed twice
        found.update(zip(numbers, values.flatten().tolist(), strict=True))

    BatchRunner(reader, batch_tokens=batch_tokens, on_values=take).run([work])
    return found


def test_an_out_of_memory_halves_the_budget_and_keeps_what_is_done() -> None:
    sequences = [(number, 0, 0, 0) for number in range(32)]
    work = plan_work(range(32), sequences=sequences, ranges=[(3, 4)] * 32, pairs=[])
    reader = Short(columns=40)
    with pytest.warns(RuntimeWarning, match="Give batch_tokens=") as said:
        found = run(reader, work, batch_tokens=128)
    assert found == {number: float(number) for number in range(32)}
    assert reader.batches == [128, 64, *[32] * 4]
    assert len(said) == 2


def test_a_fork_that_does_not_fit_is_computed_as_two_texts() -> None:
    reader = Short(columns=5)
    assert run(reader, plan(), batch_tokens=7) == {0: 1.0, 1: 1.0, 2: 7.0, 3: 9.0}
    assert reader.batches[0] == 6


def test_one_text_that_does_not_fit_is_an_error_that_says_so() -> None:
    with pytest.raises(BatchDoesNotFit, match="a text of 5 tokens does not fit"):
        run(Short(columns=4), plan(pairs=[]), batch_tokens=5)


def test_batches_stay_within_the_budget_and_begin_with_the_shortest() -> None:
    reader = Short(columns=10**6)
    run(reader, plan(pairs=[]), batch_tokens=8)
    assert reader.batches == [4, 4, 5]  # columns of each batch, its padding included


def test_what_fills_no_batch_waits_for_the_next_part_but_for_the_first_two() -> None:
    sequences = [(number, 0, 0, 0) for number in range(30)]
    work = plan_work(range(30), sequences=sequences, ranges=[(3, 4)] * 30, pairs=[])
    reader = Short(columns=10**6)
    found: list[int] = []
    parts = (work[:3], work[3:4], work[4:14], work[14:20], work[20:])
    take = lambda numbers, _: found.extend(numbers)  # noqa: E731
    BatchRunner(reader, batch_tokens=32, on_values=take).run(parts)  # type: ignore[arg-type]
    assert sorted(found) == list(range(30))
    assert reader.batches == [12, 4, 32, 32, 32, 8]


def test_rows_of_a_batch_are_bounded() -> None:
    reader = Short(columns=10**6)
    work = plan_work(range(9), sequences=[(number,) for number in range(9)], ranges=[(0, 1)] * 9, pairs=[])
    runner = BatchRunner(reader, batch_tokens=100, on_values=lambda *_: None, max_rows=4)  # type: ignore[arg-type]
    runner.run([work])
    assert reader.batches == [4, 4, 1]
