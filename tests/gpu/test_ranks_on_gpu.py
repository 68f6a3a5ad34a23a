"""Two ranks on one GPU: gloo carries what travels, since NCCL refuses a GPU that two ranks share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flatout.engines.evolution.training.trainer import evolve
from tests.support.evolution import save_tiny, tiny_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() > 1, reason="with several GPUs every rank has its own"),
]

SHARED = """
import torch
from torch import distributed, nn
from flatout.engines.run.ranks import Ranks, fold

with Ranks.join("cuda") as ranks:
    assert ranks.device.type == "cuda" and distributed.get_backend() == "gloo"
    every = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).cuda()
    found = ranks.sum_in_order(every[ranks.rank::2])
    assert found.is_cuda and found.equal(fold(every))
    torch.manual_seed(ranks.rank)
    module = nn.Linear(3, 3).cuda()
    ranks.share_weights(module)
    torch.manual_seed(0)
    assert module.weight.cpu().equal(nn.Linear(3, 3).weight)
    assert ranks.any(ranks.rank == 1)
"""
NCCL = """
import torch
from torch import distributed

torch.cuda.set_device(0)
distributed.init_process_group("nccl")
distributed.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )


def test_what_travels_between_two_ranks_of_one_gpu(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    done = torchrun(tmp_path / "shared.py")
    assert done.returncode == 0, done.stderr


def test_nccl_refuses_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """The day that it does not, gloo is no longer needed there."""
    (tmp_path / "nccl.py").write_text(NCCL)
    done = torchrun(tmp_path / "nccl.py")
    assert done.returncode != 0 and "Duplicate GPU" in done.stderr, done.stderr


def test_evolution_on_two_ranks_of_one_gpu_gives_the_weights_of_one(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    cut = {"device": "cuda", "dtype": "float32", "chunk_members": 4, "rows": 16}
    evolve(tiny_settings(model, tmp_path / "one", **cut))
    config = tmp_path / "two.yaml"
    config.write_text(json.dumps(tiny_settings(model, tmp_path / "two", **cut)))  # JSON is YAML
    done = torchrun("-m", "flatout", "evolve", config, "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["sent_bytes"]) == {"rewards"}
    last = Path("checkpoints", "epoch-000004", "tensors.safetensors")
    one, two = load_file(tmp_path / "one" / last), load_file(tmp_path / "two" / last)
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
