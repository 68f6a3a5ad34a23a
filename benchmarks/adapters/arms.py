"""The arms: five adapters in one pass, one after another, and by PEFT's `set_adapter`.

An arm is called with nothing and trains every adapter by one step on the same batches: forward, a classifier
over the first token, backward, clipping to norm 1, AdamW (torch's fused one everywhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from models import NAMES, shell, specs, with_one_adapter
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.fused_step import AdapterOptimizer, FusedStep, StepSettings
from flatout.engines.adapters.lora.token_blocks import TokenBlock
from flatout.multiplex.products.ranges import Path

Loss = Callable[[nn.Module, Tensor, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A task's rows, all of full length, and their classes."""

    block: TokenBlock
    targets: dict[str, Tensor]


def batches(*, tokens: int, vocabulary: int, device: str) -> list[Batch]:
    """`tokens` per task in rows of at most 64 tokens, or 128 where there are many."""
    length = min(tokens, 64 if tokens <= 1024 else 128)
    rows = max(1, tokens // length)
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            block=TokenBlock(
                adapter=adapter,
                ids=torch.randint(5, vocabulary, (rows, length), generator=generator).to(device),
                lengths=torch.full((rows,), length, device=device),
            ),
            targets={"classes": torch.randint(2, (rows,), generator=generator).to(device)},
        )
        for adapter in range(len(NAMES))
    ]


def class_heads(width: int, device: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(width, 2, device=device) for name in NAMES}


def class_loss(head: nn.Module, states: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(head(states[:, 0]).float(), batch.targets["classes"])


class Fused:
    """All adapters in one pass."""

    def __init__(
        self,
        model: Any,
        *,
        graph: Literal["on", "off"],
        path: Path | None = None,
        heads: dict[str, nn.Module] | None = None,
        loss: Loss = class_loss,
        dropout: float = 0.0,
    ) -> None:
        first = next(model.parameters())
        model = shell(model)
        bank = AdapterBank(model, specs(dropout=dropout), dtype=first.dtype, device=first.device)
        self.heads = heads or class_heads(model.config.hidden_size, str(first.device))
        own = self.heads
        self.encoder = PackedEncoder(model, bank, dtype=first.dtype, path=path)
        self.step = FusedStep(
            self.encoder,
            optimizer=AdapterOptimizer(
                bank, settings={name: StepSettings(num_steps=10**6) for name in NAMES}, heads=own
            ),
            loss=lambda adapter, states, batch: loss(own[NAMES[adapter]], states, batch),
            graph=graph,
        )

    def __call__(self, given: Sequence[Any]) -> None:
        self.step(given)


class Sequential:
    """One adapter after another, each as plain code with an optimizer of its own."""

    def __init__(
        self,
        model: Any,
        *,
        heads: dict[str, nn.Module] | None = None,
        loss: Loss = class_loss,
        dropout: float = 0.0,
    ) -> None:
        device = next(model.parameters()).device
        self.models = [with_one_adapter(model, spec) for spec in specs(dropout=dropout)]
        self.heads = heads or class_heads(model.config.hidden_size, str(device))
        self._loss = loss
        self.parameters = [
            [*(p for p in own.parameters() if p.requires_grad), *self.heads[name].parameters()]
            for own, name in zip(self.models, NAMES, strict=True)
        ]
        self.optimizers = [
            torch.optim.AdamW(parameters, 5e-4, fused=True, capturable=device.type == "cuda")
            for parameters in self.parameters
        ]
        half = next(model.parameters()).dtype
        self._autocast = (
            nullcontext() if half == torch.float32 else torch.autocast(device.type, half, cache_enabled=False)
        )

    def __call__(self, given: Sequence[Any]) -> None:
        for number, batch in enumerate(given):
            self.train_one(number, batch, ids=batch.block.ids, mask=None)

    def train_one(self, number: int, batch: Any, *, ids: Tensor, mask: Tensor | None) -> None:
        """A step of one adapter."""
        states = self.models[number](input_ids=ids, attention_mask=mask).last_hidden_state
        with self._autocast:  # of the head: the encoder is in its own precision
            loss = self._loss(self.heads[NAMES[number]], states, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters[number], 1.0, foreach=True)
        self.optimizers[number].step()
        self.optimizers[number].zero_grad(set_to_none=False)


class Peft:
    """PEFT with all adapters in one model, switched by `set_adapter`."""

    def __init__(self, model: Any) -> None:
        from peft import LoraConfig, get_peft_model

        first = next(model.parameters())
        targets = r".*(query|key|value|attention\.output\.dense|intermediate\.dense|\.output\.dense)"
        whole: Any = None
        for spec in specs():
            config = LoraConfig(r=spec.rank, lora_alpha=2 * spec.rank, target_modules=targets)
            if whole is None:
                whole = get_peft_model(shell(model), config, adapter_name=spec.name)
            else:
                whole.add_adapter(spec.name, config)
        self.model = whole.to(first.device)
        self.heads = class_heads(model.config.hidden_size, str(first.device))
        self.parameters = {
            name: [
                *(p for key, p in whole.named_parameters() if f".{name}." in key and "lora_" in key),
                *self.heads[name].parameters(),
            ]
            for name in NAMES
        }
        self.optimizers = {
            name: torch.optim.AdamW(parameters, 5e-4, fused=True)
            for name, parameters in self.parameters.items()
        }
        half = first.dtype
        self._autocast = nullcontext() if half == torch.float32 else torch.autocast(first.device.type, half)

    def __call__(self, given: Sequence[Any]) -> None:
        for name, batch in zip(NAMES, given, strict=True):
            self.model.set_adapter(name)
            with self._autocast:
                states = self.model(input_ids=batch.block.ids).last_hidden_state
                loss = class_loss(self.heads[name], states, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters[name], 1.0, foreach=True)
            self.optimizers[name].step()
            self.optimizers[name].zero_grad(set_to_none=False)


class Recorded:
    """Any arm as a CUDA graph on fixed batches: what launching alone costs it."""

    def __init__(self, arm: Any, given: Sequence[Any]) -> None:
        self._held = arm, given  # a graph does not keep what it reads
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                arm(given)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            arm(given)

    def __call__(self, given: Sequence[Any]) -> None:
        self._graph.replay()
