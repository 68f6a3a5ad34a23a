"""The data path on a GPU: pinned batches, copies ahead, gathers without a synchronisation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data import DeviceDataset, Pad, PadCollate, RaggedArrays, TokenBudgetBatches, prefetch, ragged
from flatout.data.device_dataset import choose_place, free_device_bytes
from flatout.ground.errors import BadInput
from tests.support.gpu import no_synchronisation

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CYCLES = 50_000_000  # some tens of milliseconds of a kernel that does nothing


def test_batches_are_written_into_pinned_memory() -> None:
    collate = PadCollate({"x": Pad(value=-1, lengths="n", mask="m")}, pinned=True)
    samples = [{"x": np.arange(n), "y": n, "t": torch.ones(n, 2), "l": [1] * n} for n in (3, 1)]
    batch = collate(samples)
    assert sorted(batch) == ["l", "m", "n", "t", "x", "y"]
    assert all(values.is_pinned() for values in batch.values())
    assert batch["x"].tolist() == [[0, 1, 2], [0, -1, -1]]


def test_pinned_memory_is_not_taken_again_before_it_was_copied() -> None:
    collate = PadCollate(pinned=True)
    torch.cuda._sleep(CYCLES)
    copies = [collate([np.full(MIB, number)]).to("cuda", non_blocking=True) for number in range(8)]
    assert [int(copy.min()) for copy in copies] == [int(copy.max()) for copy in copies] == list(range(8))


def numbered(count: int, size: int = MIB) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {
            "x": torch.full((size,), float(number)),
            "nested": [(torch.tensor([number]), "name")],
            "n": number,
        }


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_prefetched_batches_are_whole_while_kernels_still_read_them(background: bool, pinned: bool) -> None:
    def source() -> Iterator[dict[str, Any]]:
        for batch in numbered(20):
            yield {**batch, "x": batch["x"].pin_memory()} if pinned else batch

    sums = []
    for batch in prefetch(source(), "cuda", ahead=3, background=background):
        assert batch["x"].is_cuda and batch["nested"][0][0].is_cuda and batch["nested"][0][1] == "name"
        torch.cuda._sleep(CYCLES // 20)  # the kernels below read late; the batch is dropped at once
        sums.append((batch["x"].sum(), batch["n"]))
        del batch
    assert [int(total) for total, _ in sums] == [number * MIB for _, number in sums]
    assert [number for _, number in sums] == list(range(20))


def test_prefetching_frees_on_time() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in prefetch(numbered(30, size=4 * MIB), "cuda", ahead=2):
        batch["x"].sum().item()
    num_bytes = 4 * MIB * 4
    assert torch.cuda.max_memory_allocated() - before <= 5 * num_bytes
    del batch
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < num_bytes


@pytest.mark.parametrize("background", [False, True])
def test_leaving_in_the_middle(background: bool) -> None:
    batches = iter(prefetch(numbered(100), "cuda", background=background))
    assert [batch["n"] for batch in itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()  # type: ignore[attr-defined]


def pieces(device: str, lengths_on: str) -> tuple[list[torch.Tensor], list[ragged.Piece]]:
    torch.manual_seed(0)
    values = torch.randn(64, 20, 8).to(device).requires_grad_()
    query = torch.randn(64, 8).to(device).requires_grad_()
    token = torch.randn(8).to(device).requires_grad_()
    previous = torch.arange(64).remainder(2).mul(10).to(lengths_on)
    current = torch.arange(64).remainder(11).to(lengths_on)
    return [values, query, token], [
        ragged.constant(token, where=previous > 0),
        ragged.rows(values, previous),
        ragged.constant(token),
        ragged.rows(values, current, start=previous),
        ragged.each(query),
    ]


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
def test_sequences_are_built_without_waiting_and_equal_the_cpus(lengths_on: str) -> None:
    leaves, parts = pieces("cuda", lengths_on)
    expected_leaves, expected_parts = pieces("cpu", "cpu")
    ragged.concat(parts, max_length=30)  # the allocators' first call may wait
    with no_synchronisation():
        built = ragged.concat(parts, max_length=30)
        grads = torch.autograd.grad(built.values.square().sum(), leaves)
    expected = ragged.concat(expected_parts, max_length=30)
    assert torch.equal(built.values.cpu(), expected.values)
    assert torch.equal(built.lengths.cpu(), expected.lengths)
    wanted = torch.autograd.grad(expected.values.square().sum(), expected_leaves)
    for mine, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-6, atol=1e-5)


def test_lengths_on_the_gpu_are_bounded_by_max_length() -> None:
    values = torch.arange(12.0, device="cuda").view(2, 6)
    lengths = torch.tensor([2, 6], device="cuda")
    built = ragged.concat([ragged.rows(values, lengths)], max_length=4)
    assert built.values.tolist() == [[0, 1, 0, 0], [6, 7, 8, 9]]
    assert built.lengths.tolist() == [2, 4]


def test_a_cuda_graph_builds_sequences_of_other_lengths() -> None:
    values = torch.randn(8, 6, 4, device="cuda")
    token = torch.randn(4, device="cuda")
    lengths = torch.full((8,), 3, device="cuda")

    def build() -> torch.Tensor:
        first = ragged.rows(values, lengths)
        rest = ragged.rows(values, start=lengths)
        return ragged.concat([first, ragged.constant(token, where=lengths > 0), rest], max_length=7).values

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        build()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build()
    for number in range(3):
        lengths.copy_((torch.arange(8) + number) % 7)
        graph.replay()
        assert torch.equal(captured, build())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        values.add(1)  # a graph without a kernel warns
        with pytest.raises(BadInput, match="a CUDA graph would keep reading"):
            ragged.concat([ragged.rows(values, [1] * 8)])


def test_interleaving_on_the_gpu() -> None:
    streams = [torch.randn(8, 5, 3) for _ in range(2)]
    lengths = [torch.arange(8) % 6, torch.arange(8).flip(0) % 5]
    here = ragged.interleave(
        [ragged.rows(s, n) for s, n in zip(streams, lengths, strict=True)], max_length=10
    )
    sent = [ragged.rows(s.cuda(), n.cuda()) for s, n in zip(streams, lengths, strict=True)]
    ragged.interleave(sent, max_length=10)
    with no_synchronisation():
        there = ragged.interleave(sent, max_length=10)
    assert torch.equal(there.values.cpu(), here.values)


def arrays() -> RaggedArrays:
    lengths = np.arange(200) % 17
    starts = np.cumsum(lengths) - lengths
    flat = np.random.default_rng(0).integers(0, 100, (int(lengths.sum()), 2)).astype(np.int8)
    return RaggedArrays({"x": flat, "y": np.arange(200)}, spans={"x": (starts, lengths)})


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_dataset_on_the_gpu_gives_what_one_on_the_host_gives_without_waiting(form: Any) -> None:
    pads = {"x": Pad(value=-1, dtype=torch.float32, mask="mask")} if form == "padded" else None
    there, here = (
        DeviceDataset(arrays(), device="cuda", batch_size=32, form=form, pads=pads, place=place)
        for place in ("auto", "host")
    )
    assert there.placement.value == "device" and "free on cuda" in there.placement.reason
    list(there)
    there.set_epoch(0)
    with no_synchronisation():
        batches = list(there)
    for mine, other in zip(batches, here, strict=True):
        assert mine.keys() == other.keys()
        assert all(mine[name].is_cuda and torch.equal(mine[name], other[name]) for name in mine)


def test_a_dataset_that_does_not_fit_stays_on_the_host() -> None:
    device = torch.device("cuda")
    free = free_device_bytes(device)
    torch_free = torch.cuda.mem_get_info()[0]
    assert 0.8 * torch_free <= free <= 1.2 * torch_free + torch.cuda.memory_reserved()
    assert choose_place(free, device=device, place="auto", memory_share=0.5).value == "host"
    assert choose_place(free // 4, device=device, place="auto", memory_share=0.5).value == "device"


def test_token_budget_batches_from_the_gpu() -> None:
    data = arrays()
    sampler = TokenBudgetBatches(data.lengths(), tokens=128)
    seen = [batch["y"] for batch in DeviceDataset(data, device="cuda", batches=sampler)]
    assert sorted(torch.cat(seen).tolist()) == list(range(200))
