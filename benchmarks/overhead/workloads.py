"""Three training loops whose steps are small enough to make an instrument's cost visible.

modules     81 modules, about 5 ms a step on one CPU core: many nested calls, little work in each
encoder     a four-layer transformer encoder on one resident batch
loader      a network of some 15 ms a step, fed by a DataLoader with two workers and a padding collate
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class Ragged(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16 + index * 7919 % 48, 32), float(index % 7))


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def modules(device: str) -> Callable[[], Step]:
    model = nn.Sequential(*(Block(256) for _ in range(16))).to(device)
    x = torch.randn(64 if device == "cpu" else 4096, 256, device=device)
    return _resident(model, lambda: model(x).square().mean())


def encoder(device: str) -> Callable[[], Step]:
    width, rows = (128, 16) if device == "cpu" else (1024, 64)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    x = torch.randn(rows, 64, width, device=device)
    return _resident(model, lambda: model(x).square().mean())


def loader(device: str) -> Callable[[], Step]:
    width, num_hidden = (512, 0) if device == "cpu" else (4096, 2)
    hidden = [layer for _ in range(num_hidden) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(nn.Linear(32, width), nn.GELU(), *hidden, nn.Linear(width, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make() -> Step:
        batches = iter(
            DataLoader(Ragged(), batch_size=64, num_workers=2, collate_fn=pad, pin_memory=device != "cpu")
        )

        def step() -> None:
            batch = next(batches).to(device, non_blocking=True)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    return make


def _resident(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return lambda: step


WORKLOADS: dict[str, Callable[[str], Callable[[], Step]]] = {
    "modules": modules,
    "encoder": encoder,
    "loader": loader,
}


def environment(device: str) -> dict[str, Any]:
    """What a result is stamped with."""
    import platform

    import flatout
    from flatout.hardware.host import read_host

    cpu = f"{read_host().cpu_model or 'CPU'}, {torch.get_num_threads()} thread"
    name = torch.cuda.get_device_name() if device == "cuda" else cpu
    return {
        "hardware": name,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "flatout": flatout.__version__,
    }
