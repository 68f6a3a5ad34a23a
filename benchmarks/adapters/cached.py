"""Phase 2, the router: features encoded once against features encoded in every epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from limits import wait
from models import NAMES, shell
from torch import Tensor, nn

from flatout.engines.adapters.lora.encoder import PackedEncoder, pool_rows
from flatout.engines.adapters.lora.token_blocks import TokenBlock


def phase_two(model: Any, *, rows: int, length: int, epochs: int, device: str) -> dict[str, float]:
    """Seconds of `epochs` over `rows` with and without a cache; both train the same router."""
    encoder = PackedEncoder(shell(model), None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (rows, length), generator=generator).to(device)
    tasks = torch.randint(len(NAMES), (rows,), generator=generator).to(device)
    lengths = torch.full((rows,), length, device=device)
    batch = max(8, rows // 8)

    @torch.no_grad()
    def features(chosen: slice) -> Tensor:
        block = TokenBlock(adapter=0, ids=ids[chosen], lengths=lengths[chosen])
        return pool_rows(encoder((block,))[0], block.lengths).float()

    def epochs_s(cache: bool) -> float:
        width = encoder.width
        router = nn.Sequential(
            nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, len(NAMES))
        ).to(device)
        optimizer = torch.optim.AdamW(router.parameters(), 1e-3, fused=True)
        parts = [slice(start, start + batch) for start in range(0, rows, batch)]
        wait(device)
        start = time.perf_counter()
        kept = [features(part) for part in parts] if cache else None
        for _ in range(epochs):
            for number, part in enumerate(parts):
                inside = features(part) if kept is None else kept[number]
                F.cross_entropy(router(inside), tasks[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
        wait(device)
        return time.perf_counter() - start

    epochs_s(True)
    found = {"cached_s": epochs_s(True), "uncached_s": epochs_s(False)}
    return found | {"epochs": epochs, "rows": rows, "ratio": found["uncached_s"] / found["cached_s"]}
