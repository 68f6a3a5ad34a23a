"""Adam with two states in eight bits, as bitsandbytes keeps them; computed without the package.

A parameter of at least 4096 values has two states of one byte a value, each with one float32 scale for every
256 values; a smaller one has both states in float32.  The two tables that translate bytes into values, of 256
float32 each, are shared by all parameters.  A paged optimizer keeps states of 100,000 values and more in
managed memory, which PyTorch's allocator does not see and the driver moves out when room is short.  The
update is one kernel for each parameter, in place, without a workspace.

bitsandbytes' kernels need data, so a trace steps this optimizer in place of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

PACKAGE = "bitsandbytes"
SMALLEST = 4096  # values; a smaller parameter keeps its states in float32
BLOCK = 256  # values that share a scale
TABLE = 256
PAGED_FROM = 100_000  # values
NAMES = ("adam_8bit", "adam8bit", "adamw_8bit", "adamw8bit", "adam_bnb_8bit", "adamw_bnb_8bit")
PREFIXES = ("bitsandbytes.optim.", "bnb.optim.", "bnb.")


class EightBitAdam(torch.optim.Optimizer):
    """Holds what bitsandbytes' Adam holds; it changes no parameter."""

    def __init__(self, params: Any, *, paged: bool = False, smallest: int = SMALLEST) -> None:
        super().__init__(params, {})
        self.paged, self.smallest = paged, smallest
        self.tables: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._made(parameter)
        return loss

    def _made(self, parameter: Tensor) -> dict[str, Tensor]:
        count = parameter.numel()
        paged = self.paged and count >= PAGED_FROM
        if count < self.smallest:
            return {name: _zeros(parameter, count, torch.float32) for name in ("state1", "state2")}
        if not self.tables:
            self.tables = [_zeros(parameter, TABLE, torch.float32) for _ in range(2)]
        state = dict(zip(("qmap1", "qmap2"), self.tables, strict=True))
        for number in ("1", "2"):
            if not paged:
                state[f"state{number}"] = _zeros(parameter, count, torch.uint8)
            state[f"absmax{number}"] = _zeros(parameter, -(-count // BLOCK), torch.float32)
        return state


def _zeros(parameter: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=parameter.device)


def eight_bit_named(name: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None:
    """Return the optimizer a config calls `name` (Hugging Face or bitsandbytes spelling), or None."""
    word = name.casefold()
    for prefix in PREFIXES:
        word = word.removeprefix(prefix)
    paged = word.startswith("paged")
    if word.removeprefix("paged").removeprefix("_") not in NAMES:
        return None
    return lambda parameters: (
        _make_installed(parameters, paged=paged) or EightBitAdam(parameters, paged=paged)
    )


def _make_installed(parameters: Iterable[torch.nn.Parameter], *, paged: bool) -> torch.optim.Optimizer | None:
    """Return bitsandbytes' own optimizer for a run on a GPU; None if the package is not installed."""
    if not torch.cuda.is_available() or importlib.util.find_spec(PACKAGE) is None:
        return None
    optimizers: Any = importlib.import_module(f"{PACKAGE}.optim")
    make = optimizers.PagedAdamW8bit if paged else optimizers.AdamW8bit
    made: torch.optim.Optimizer = make(parameters, lr=1e-4)
    return made


def without_data(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return what a trace steps: a stand-in for bitsandbytes' eight-bit optimizers, others as they are."""
    if optimizer is None or not type(optimizer).__module__.startswith(PACKAGE):
        return optimizer
    settings: Any = getattr(optimizer, "args", None)
    if getattr(settings, "optim_bits", 32) != 8:
        return optimizer
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    return EightBitAdam(
        groups,
        paged=bool(getattr(optimizer, "is_paged", False)),
        smallest=int(getattr(settings, "min_8bit_size", SMALLEST)),
    )
