"""Alone, every question is answered at once; batches are shared out evenly or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.engines.adapters.training.processes import Processes
from flatout.errors import BadInput


def of_two(rank: int) -> Processes:
    return Processes(device=torch.device("cpu"), rank=rank, num=2)


def test_alone_is_the_first_and_everything_is_its_own() -> None:
    alone = Processes.join("cpu")
    assert (alone.rank, alone.num, alone.first, alone.device.type) == (0, 1, True, "cpu")
    tensor = torch.tensor([1.0, 2.0])
    alone.mean([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert alone.any(True) and not alone.any(False)
    alone.agree("anything", 3)
    alone.align(nn.Linear(2, 2))
    with alone:
        assert list(alone.own(range(4, 8))) == [4, 5, 6, 7]


def test_two_take_every_other_batch() -> None:
    assert [list(of_two(rank).own(range(4, 8))) for rank in (0, 1)] == [[4, 6], [5, 7]]


def test_what_cannot_be_shared_evenly_is_said_with_what_can() -> None:
    of_two(0).check_share(4, phase="phase1")
    with pytest.raises(BadInput, match=r"phase3.accumulate=3 .* 2 processes .*phase3.accumulate=4"):
        of_two(0).check_share(3, phase="phase3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(BadInput, match="torch sees no GPU here"):
        Processes.join("cuda")
