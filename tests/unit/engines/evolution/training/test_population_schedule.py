"""Every member runs once; and where results must agree, the cut does not depend on how many ranks run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.engines.evolution.training.population_schedule import (
    CPU_ROWS,
    GPU_ROWS,
    Needs,
    PopulationSchedule,
    halve_rows,
    needs_of,
    schedule,
)
from flatout.ground.errors import BadInput, BatchDoesNotFit
from flatout.multiplex.models.families import read_decoder
from tests.support.evolution import tiny_llama

CPU = Needs(row_bytes=1000, variant_bytes=1000, free_bytes=None)
GIB = 2**30


def on_gpu(free_bytes: int, *, row_bytes: int = 2**20, variant_bytes: int = 2**20) -> Needs:
    return Needs(row_bytes=row_bytes, variant_bytes=variant_bytes, free_bytes=free_bytes)


def cut(population: int, prompts: int, needs: Needs, **options: int) -> PopulationSchedule:
    return schedule(population=population, prompts=prompts, antithetic=True, needs=needs, **options)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans())
def test_every_member_runs_once_and_pairs_stay_together(
    pairs: int, prompts: int, num_ranks: int, gpu: bool, antithetic: bool
) -> None:
    population = 2 * pairs if antithetic else pairs
    found = schedule(
        population=population,
        prompts=prompts,
        antithetic=antithetic,
        needs=on_gpu(GIB) if gpu else CPU,
        num_ranks=num_ranks,
    )
    ran = [
        member
        for rank in range(num_ranks)
        for chunk in found.of_rank(rank, num_ranks=num_ranks)
        for member in chunk
    ]
    assert sorted(ran) == list(range(population))
    assert all(len(chunk) <= found.chunk_members.value for chunk in found.chunks)
    if antithetic:
        assert all(chunk.start % 2 == 0 for chunk in found.chunks)


@given(st.integers(1, 100), st.integers(1, 20), st.integers(1, 8))
def test_on_a_cpu_the_cut_does_not_depend_on_the_ranks(pairs: int, prompts: int, num_ranks: int) -> None:
    alone = cut(2 * pairs, prompts, CPU)
    assert cut(2 * pairs, prompts, CPU, num_ranks=num_ranks) == alone
    assert alone.rows.value == min(CPU_ROWS, 2 * pairs * prompts)


def test_on_a_gpu_a_rank_gets_one_long_queue_while_its_noise_fits() -> None:
    assert len(cut(1024, 8, on_gpu(16 * GIB), num_ranks=4).chunks) == 4
    tight = cut(1024, 8, on_gpu(16 * GIB, variant_bytes=2**26), num_ranks=4)
    assert len(tight.chunks) > 4
    assert len({len(chunk) for chunk in tight.chunks[:-1]}) == 1


def test_rows_follow_the_memory() -> None:
    assert cut(4096, 8, on_gpu(64 * GIB)).rows.value == GPU_ROWS
    some = cut(4096, 8, on_gpu(GIB)).rows
    assert some.value % 64 == 0 and 64 <= some.value < 573
    assert some.source == "computed" and "1.00 MiB per row" in some.reason
    assert cut(4, 2, on_gpu(GIB)).rows.value == 8
    assert cut(64, 8, CPU, rows=100).rows.value == 100


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(BatchDoesNotFit, match="one row takes"):
        cut(8, 1, on_gpu(GIB, row_bytes=GIB))
    with pytest.raises(BatchDoesNotFit, match="one variant"):
        cut(8, 1, on_gpu(GIB, variant_bytes=GIB))
    with pytest.raises(BadInput, match="rows=0"):
        cut(8, 1, CPU, rows=0)
    with pytest.raises(BadInput, match="chunk_members=3"):
        cut(8, 1, CPU, chunk_members=3)
    assert len(cut(8, 1, CPU, chunk_members=4).chunks) == 2


def test_needs_are_counted_from_the_model() -> None:
    decoder = read_decoder(tiny_llama(width=32, layers=2))
    names = tuple(decoder.projections())
    found = needs_of(decoder, max_tokens=10, rank=3, noise="int8", targets=names)
    assert found.row_bytes == 2 * (2 * 2 * 8) * 10 * 4 + 12 * 16
    # qkv 32 -> 64, out 32 -> 32, gate and up 32 -> 128, down 64 -> 32
    assert found.variant_bytes == 2 * 3 * (96 + 64 + 160 + 96)
    assert found.free_bytes is None


def test_half_the_rows_are_the_same_chunks() -> None:
    whole = cut(8, 4, CPU, rows=6)
    found = []
    while whole.rows.value > 1:
        found.append(whole.rows.value)
        less = halve_rows(whole)
        assert less.chunks == whole.chunks and less.chunk_members == whole.chunk_members
        whole = less
    assert found == [6, 2] and "did not fit" in whole.rows.reason
    with pytest.raises(BatchDoesNotFit, match="not even one row"):
        halve_rows(whole)
