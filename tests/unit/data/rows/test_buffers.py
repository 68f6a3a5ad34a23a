from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from flatout.data.rows.buffers import ALIGNMENT_BYTES, KEPT_BYTES, Buffers, send


def test_fresh_memory_where_none_is_kept() -> None:
    buffers = Buffers(pinned=False, reuse=0)
    assert buffers.plain(0) and buffers.plain(1 << 30)
    assert buffers.empty("x", (2, 3), torch.bfloat16).shape == (2, 3)


def test_large_fields_are_kept_where_no_number_is_given() -> None:
    buffers = Buffers(pinned=False, reuse=None)
    assert buffers.plain(KEPT_BYTES - 1) and not buffers.plain(KEPT_BYTES)
    addresses = {buffers.empty("x", (KEPT_BYTES,), torch.uint8).data_ptr() for _ in range(5)}
    assert len(addresses) == 1
    held = [buffers.empty("x", (KEPT_BYTES,), torch.uint8) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in held}) == 4


def test_threads_get_buffers_of_their_own() -> None:
    buffers = Buffers(pinned=False, reuse=4)

    def fill(number: int) -> bool:
        values = buffers.empty("x", (256,), torch.int64).fill_(number)
        return bool((values == number).all())

    with ThreadPoolExecutor(max_workers=4) as pool:
        assert all(pool.map(fill, range(400)))


def test_a_buffer_in_use_is_never_handed_out() -> None:
    buffers = Buffers(pinned=False, reuse=2)
    assert not buffers.plain(0)
    held = [buffers.empty("x", (8,), torch.int64).fill_(number) for number in range(5)]
    assert len({tensor.data_ptr() for tensor in held}) == 5
    assert [tensor[0].item() for tensor in held] == [0, 1, 2, 3, 4]


def test_an_idle_buffer_is_used_again_and_grows() -> None:
    buffers = Buffers(pinned=False, reuse=1)
    first = buffers.empty("x", (100,), torch.float32)
    address = first.data_ptr()
    assert address % ALIGNMENT_BYTES == 0
    del first
    second = buffers.empty("x", (10, 5), torch.float64)
    assert second.data_ptr() == address
    del second
    assert buffers.empty("x", (1000,), torch.float64).shape == (1000,)


def test_a_view_keeps_the_buffer() -> None:
    buffers = Buffers(pinned=False, reuse=1)
    whole = buffers.empty("x", (4, 4), torch.int32).fill_(7)
    view: Any = whole.numpy()[1:, 2]
    del whole
    other = buffers.empty("x", (4, 4), torch.int32).fill_(0)
    assert (view == 7).all()
    del view
    assert buffers.empty("x", (4, 4), torch.int32).data_ptr() != other.data_ptr()


def test_fields_have_buffers_of_their_own() -> None:
    buffers = Buffers(pinned=False, reuse=1)
    x, y = buffers.empty("x", (4,), torch.int8), buffers.empty("y", (4,), torch.int8)
    assert x.data_ptr() != y.data_ptr()


def test_kept_buffers_do_not_travel() -> None:
    buffers = Buffers(pinned=False, reuse=3)
    buffers.empty("x", (1 << 20,), torch.int8)
    assert len(pickle.dumps(buffers)) < 1000
    assert not pickle.loads(pickle.dumps(buffers)).plain(0)  # noqa: S301


class Shared:
    """A collate that says whether its memory is shared."""

    def __init__(self) -> None:
        self.buffers = Buffers(pinned=True, reuse=2)

    def __call__(self, samples: list[int]) -> tuple[torch.Tensor, bool]:
        values = self.buffers.empty("x", (len(samples),), torch.int64)
        values.copy_(torch.tensor(samples))
        return values, values.is_shared()


def test_workers_write_into_shared_memory() -> None:
    loader: Any = DataLoader(list(range(8)), batch_size=2, num_workers=1, collate_fn=Shared())  # type: ignore[arg-type]
    batches = list(loader)
    assert all(shared for _, shared in batches)
    assert torch.cat([values for values, _ in batches]).tolist() == list(range(8))


def test_what_is_sent_keeps_its_values_and_types() -> None:
    assert torch.equal(send(np.array([1, 2]), "cpu"), torch.tensor([1, 2]))
    assert send(np.array(2.5, dtype=np.float32), "cpu").dtype == torch.float32
    assert torch.equal(send(torch.eye(2), torch.device("cpu")), torch.eye(2))
