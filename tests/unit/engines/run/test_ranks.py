"""Ranks: who this process is, sums without rounding, and what all of them share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.engines.run.meeting import Meeting
from flatout.engines.run.ranks import Ranks, choose_device, device_name, fold
from flatout.ground.errors import BadInput
from flatout.ground.torchrun import Launch
from flatout.hardware.host import read_host
from tests.support.warm_python import warm


def test_alone_everything_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.join("cpu") as ranks:
        values = torch.tensor([1.0, torch.nan])
        assert ranks.gather(values) is values
        assert ranks.first and (ranks.rank, ranks.num_ranks, ranks.device.type) == (0, 1, "cpu")
        ranks.agree("anything", 3)
        assert ranks.any(True) and not ranks.any(False)
        ranks.share_weights(nn.Linear(2, 2))
        assert ranks.texts("here") == ["here"]
        assert not ranks.sent_bytes
        assert list(ranks.own(range(4, 8))) == [4, 5, 6, 7]


def test_two_take_every_other_number() -> None:
    two = [Ranks(device=torch.device("cpu"), rank=rank, num_ranks=2) for rank in (0, 1)]
    assert [list(ranks.own(range(4, 8))) for ranks in two] == [[4, 6], [5, 7]]


def test_the_first_of_the_second_node_keeps_what_the_first_cannot() -> None:
    cpu = torch.device("cpu")

    def deputies(num_ranks: int, num_local_ranks: int | None) -> list[int]:
        meeting = Meeting(Launch(num_local_ranks=num_local_ranks))
        ranks = [
            Ranks(device=cpu, rank=rank, num_ranks=num_ranks, meeting=meeting) for rank in range(num_ranks)
        ]
        return [each.rank for each in ranks if each.is_deputy]

    assert deputies(8, 4) == [4]
    assert deputies(2, 2) == deputies(3, None) == deputies(2, 1) == [1]


def test_devices_are_checked() -> None:
    assert choose_device("cpu", local_rank=5).type == "cpu"
    with pytest.raises(BadInput, match="no device 'tpu'"):
        choose_device("tpu")
    if not torch.cuda.is_available():
        assert choose_device("auto").type == "cpu"
        with pytest.raises(BadInput, match="torch sees no GPU here"):
            choose_device("cuda")


def test_parts_are_added_one_after_the_other() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert fold(parts).tolist() == [1.0]  # float32: 1e8 + 1 is 1e8
    assert parts[0].item() == 1e8


SCRIPT = """
import warnings
import torch
from torch import nn
from flatout.engines.run.ranks import Ranks, fold
from flatout.ground.errors import BadInput
warnings.simplefilter("error", FutureWarning)  # every rank would print what torch is about to remove
with Ranks.join("cpu") as ranks:
    values = torch.zeros(4, dtype=torch.float64)
    values[ranks.rank::2] = torch.tensor([0.1, float("nan")], dtype=torch.float64) * (ranks.rank + 1)
    gathered = ranks.gather(values, what="rewards")
    assert gathered[:2].tolist() == [0.1, 0.2] and gathered[2:].isnan().all(), gathered
    assert ranks.sent_bytes == {"rewards": 4 * 8}, ranks.sent_bytes
    ranks.agree("the epoch", 4)
    try:
        ranks.agree("the epoch", ranks.rank)
    except BadInput as error:
        assert "0, 1" in str(error)
    else:
        raise AssertionError
    # Three batches on each of two ranks, of seven numbers: the sum is that of one process, bit for bit.
    every = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 4)
    assert ranks.sum_in_order(every[ranks.rank::2]).equal(fold(every))
    assert ranks.sent_bytes["gradients"] == (3 + 1) * 4 * 4  # half of eight numbers each
    # Buffers are used again: nothing of the last exchange is left, and another width gets its own.
    for seed, width in enumerate((7, 7, 4)):
        other = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
        assert ranks.sum_in_order(other[ranks.rank::2]).equal(fold(other))
    assert ranks.any(ranks.rank == 1) and not ranks.any(False)
    torch.manual_seed(ranks.rank)
    module = nn.Linear(3, 3)
    ranks.share_weights(module)
    torch.manual_seed(0)
    assert torch.equal(module.weight, nn.Linear(3, 3).weight)
    assert ranks.texts(f"of {ranks.rank}") == ["of 0", "of 1"]
"""


def test_two_ranks_fill_in_each_others_values(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = warm().run("torchrun", "--standalone", "--nproc_per_node", "2", script)
    assert done.returncode == 0, done.stderr


def test_a_cpu_is_called_by_its_name_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = read_host()
    for known, shown in (("Xeon", "Xeon"), (None, "CPU")):
        changed = dataclasses.replace(host, cpu_model=known)
        monkeypatch.setattr("flatout.engines.run.ranks.read_host", lambda changed=changed: changed)
        assert device_name(torch.device("cpu")) == shown
