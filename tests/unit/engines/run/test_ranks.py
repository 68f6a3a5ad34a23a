"""Ranks: who this process is, and sums without rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatout.engines.run.ranks import Ranks, own_device
from flatout.errors import BadInput


def test_alone_everything_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.join("cpu") as ranks:
        values = torch.tensor([1.0, torch.nan])
        assert ranks.gather(values) is values
        assert ranks.first and ranks.num_ranks == 1
        ranks.barrier()
        ranks.agree("anything", 3)


def test_devices_are_checked() -> None:
    assert own_device("cpu", local_rank=5).type == "cpu"
    with pytest.raises(BadInput, match="no device 'tpu'"):
        own_device("tpu", local_rank=0)
    if not torch.cuda.is_available():
        assert own_device("auto", local_rank=0).type == "cpu"
        with pytest.raises(BadInput, match="no GPU"):
            own_device("cuda", local_rank=0)


SCRIPT = """
import sys, torch
from flatout.engines.run.ranks import Ranks
from flatout.errors import BadInput
with Ranks.join("cpu") as ranks:
    values = torch.zeros(4, dtype=torch.float64)
    values[ranks.rank::2] = torch.tensor([0.1, float("nan")], dtype=torch.float64) * (ranks.rank + 1)
    gathered = ranks.gather(values)
    assert gathered[:2].tolist() == [0.1, 0.2] and gathered[2:].isnan().all(), gathered
    ranks.agree("the epoch", 4)
    try:
        ranks.agree("the epoch", ranks.rank)
    except BadInput as error:
        assert "0, 1" in str(error)
    else:
        raise AssertionError
    ranks.barrier()
"""


def test_two_ranks_fill_in_each_others_values(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
