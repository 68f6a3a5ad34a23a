from __future__ import annotations

import numpy as np
import torch

from flatout.tuner.trial.hashes import CHUNK, hash_of, hash_of_batch


def test_hashes_tell_apart_what_a_sum_takes_for_equal() -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert hash_of(one) == hash_of(one.clone())
    others = [one.flip(0), one.view(4), one.double(), -one, one.T.contiguous(), torch.zeros(2, 2)]
    nudged = one.clone()
    nudged[0, 0] = torch.nextafter(nudged[0, 0], torch.tensor(2.0))
    assert len({hash_of(each) for each in (one, nudged, *others)}) == 8


def test_the_layout_does_not_matter_and_every_kind_has_a_hash() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert hash_of(image) == hash_of(image.contiguous(memory_format=torch.channels_last))
    kinds = (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
    assert len({hash_of(torch.ones(3).to(kind)) for kind in kinds}) == len(kinds)
    places = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert hash_of(sparse) == hash_of(sparse.clone()) != hash_of(sparse.to_dense())
    long = torch.zeros(CHUNK + 2)
    before = hash_of(long)
    long[-1] = 1
    assert hash_of(long) != before


def test_a_batch_is_all_its_arrays_in_order() -> None:
    x, y = torch.ones(2), np.zeros(3)
    assert hash_of_batch({"x": x, "y": [y]}) == hash_of_batch((x, y))
    assert hash_of_batch((x, y)) != hash_of_batch((x, y + 1))
