"""Jobs for the benchmarks of training over nodes: small models, and torchrun agents on this machine as nodes.

The store of the rendezvous is in this process, as etcd or a login node would hold it: any agent may die.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

# Sums of more threads round in another order: every process has one.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# torch 2.13 tells an agent that joins later where the ranks meet only if each round has its own store.
ENVIRONMENT["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"  # the only link of a namespace
# A node that is gone is found out within seconds; torchrun's own limits are 30 s and 15 s.
RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
PATIENCE_S = 400.0


def save_causal(folder: Path, *, width: int, layers: int) -> Path:
    """A causal language model with random weights, for a task of token numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_encoder(folder: Path, *, width: int, layers: int) -> Path:
    """A BERT with random weights, and a tokenizer."""
    from transformers import BertConfig, BertModel

    from flatout.testing.adapter_tasks import tiny_tokenizer

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),  # as wide as BERT's, which attention kernels take
        max_position_embeddings=96,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evolution(folder: Path, *, width: int = 32, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Settings of `flatout evolve` without `out`."""
    return {
        "model": str(save_causal(folder / "causal", width=width, layers=layers)),
        "task": "digit-copy",
        "task_options": {"length": 2, "token_ids": True},
        "population": 16,
        "prompts": 4,
        "epochs": 40,
        "sigma": 0.1,
        "lr": 0.02,
        "optimizer": "adamw",
        "rows": 16,
        "evaluate_every": 10,
        "evaluate_prompts": 8,
        "checkpoint_every": 5,
        "plain_every": 1000,
        "save_model": False,
        **changes,
    }


def adapters(folder: Path, *, width: int = 16, layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Settings of `flatout adapt train` without `out`."""
    rows = {"source": "generated", "num_train": 400, "num_validation": 16, "num_test": 16}
    phase = {"tokens": 512, "accumulate": 2, "buckets": 2, "lr": 0.001, "validate_rows": 16}
    return {
        "model": str(save_encoder(folder / "encoder", width=width, layers=layers)),
        "device": "cpu",
        "max_length": 96,
        "log_every": 1,
        "checkpoint_every": 10,
        "tasks": {
            "sentiment": {"rank": 8, "data": rows},
            "translation": {"rank": 8, "data": rows, "settings": {"max_target_length": 32}},
        },
        "decoder": {"layers": 1},
        "router": {"hidden": [32]},
        "phase1": {**phase, "steps": 60, "evaluate_every": 20},
        "phase2": {"epochs": 2, "rows": 64},
        "phase3": {**phase, "steps": 20, "evaluate_every": 10},
        **changes,
    }


VERBS: dict[str, tuple[list[str], Callable[..., dict[str, Any]]]] = {
    "evolve": (["evolve"], evolution),
    "adapt": (["adapt", "train"], adapters),
}


class Job:
    """One run of a verb in `out`, under an agent per node."""

    def __init__(self, verb: str, settings: dict[str, Any], out: Path, *, nodes: str = "2") -> None:
        self.out, self._nodes = out, nodes
        self._config = out.with_suffix(".yaml")
        self._config.write_text(json.dumps({**settings, "out": str(out)}))  # JSON is YAML
        self.command = [sys.executable, "-m", "flatout", *VERBS[verb][0], str(self._config), "--json"]
        self._rendezvous()
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def _rendezvous(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self, node: int, *more: str) -> None:
        """Start an agent, as the first or as another attempt of its node."""
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        agent = ["--nnodes", self._nodes, "--nproc-per-node", "1", "--max-restarts", "4"]
        agent += ["--local-addr", "127.0.0.1", *place]
        self.agents[node] = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *agent, "--rdzv-id", "job"),
                *("--rdzv-conf", RENDEZVOUS, *self.command[1:], *more),
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=(self.out.parent / f"{self.out.name}-node{node}.log").open("a"),
            text=True,
        )

    def start_all(self, *more: str) -> None:
        for node in (0, 1):
            self.start(node, *more)

    def workers(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.agents[node].pid).children(recursive=True)

    def restart_all(self, *more: str) -> None:
        """Begin again after all agents are gone, with a rendezvous of its own."""
        self._rendezvous()
        self.start_all(*more)

    def wait_for(self, lines: int) -> None:
        """Wait until the log has so many records."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.records()) < lines:
            if time.monotonic() > deadline_s or all(each.poll() is not None for each in self.agents.values()):
                raise SystemExit(f"{self.out}: the run ended or stood still before record {lines}")
            time.sleep(0.02)

    def finish(self) -> dict[str, Any]:
        """Wait for the agents, and return what the first rank says."""
        said = [agent.communicate(timeout=PATIENCE_S)[0] for agent in self.agents.values()]
        codes = [agent.returncode for agent in self.agents.values()]
        if any(codes):
            logs = [
                path.read_text()[-4000:] for path in sorted(self.out.parent.glob(f"{self.out.name}-*.log"))
            ]
            raise SystemExit("\n".join([*logs, f"{self.out}: agents ended with {codes}"]))
        (answer,) = [json.loads(each) for each in said if each]
        return dict(answer)

    def records(self) -> list[dict[str, Any]]:
        path = self.out / "log.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [record for line in lines if "format" not in (record := json.loads(line))]
