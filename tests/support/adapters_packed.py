"""Small encoders with random weights, adapters of mixed ranks for them, and each adapter as a model alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import AdapterBank, AdapterSpec
from flatout.engines.adapters.lora.token_blocks import TokenBlock, TokenBlocks, block_of

VOCABULARY, WIDTH = 97, 32
RANKS = (16, 24, 32)
PAD = 1


def bert(*, num_layers: int = 2, seed: int = 0) -> Any:
    """A BERT (and so a MiniLM) whose states depend on everything: random weights far from zero."""
    from transformers import BertConfig, BertModel

    return _random(BertModel(BertConfig(**_sizes(num_layers), type_vocab_size=2)), seed)


def roberta(*, num_layers: int = 2, seed: int = 0) -> Any:
    from transformers import RobertaConfig, RobertaModel

    return _random(RobertaModel(RobertaConfig(**_sizes(num_layers))), seed)


def _sizes(num_layers: int) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40,
        "pad_token_id": PAD,
    }


def _random(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.ndim == 1 and name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(around + torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


def specs(ranks: Sequence[int] = RANKS, **given: Any) -> list[AdapterSpec]:
    """One adapter per rank; scales differ where no alpha is given."""
    names = "abcdefgh"
    return [
        AdapterSpec(**{"name": names[place], "rank": rank, "alpha": 24.0 + 8 * place} | given)
        for place, rank in enumerate(ranks)
    ]


def filled(bank: AdapterBank, *, seed: int = 1) -> AdapterBank:
    """The bank with random B, so that its adapters do something."""
    generator = torch.Generator().manual_seed(seed)
    for number, spec in enumerate(bank.specs):
        for site in bank.sites.values():
            if site.adapted[number]:
                drawn = torch.randn(spec.rank, site.num_out, generator=generator) * 0.05
                bank.factors[number, : spec.rank, site.expand] = drawn.to(bank.device)
    bank.refresh()
    return bank


def blocks(
    shapes: Sequence[tuple[int, int]] = ((3, 7), (2, 12), (4, 5)),
    *,
    seed: int = 0,
    types: bool = False,
    device: str = "cpu",
) -> TokenBlocks:
    """A block per shape (rows, longest), its rows of random lengths; the first row is full."""
    random = np.random.default_rng(seed)
    made = []
    for adapter, (num_rows, longest) in enumerate(shapes):
        lengths = [longest, *random.integers(1, longest + 1, num_rows - 1)]
        ids = [random.integers(3, VOCABULARY, length) for length in lengths]
        kinds = [random.integers(0, 2, length) for length in lengths] if types else None
        made.append(block_of(ids, adapter=adapter, pad_id=PAD, types=kinds, device=device))
    return tuple(made)


def plain_states(model: Any, block: TokenBlock) -> Tensor:
    """What the Hugging Face model says by itself."""
    states: Tensor = model(
        input_ids=block.ids, attention_mask=block.mask().long(), token_type_ids=block.types
    ).last_hidden_state
    return states


def difference(ours: Tensor, theirs: Tensor, block: TokenBlock) -> float:
    """The largest difference at real tokens."""
    return float(((ours - theirs).detach().abs() * block.mask()[..., None]).max())


class LoraLinear(nn.Module):
    """A linear map with one adapter, written plainly."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())  # [rank, in], [out, rank]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)
        return y


def alone(model: Any, bank: AdapterBank, name: str) -> Any:
    """A copy of the model with one adapter of the bank, whose factors are parameters of their own."""
    own = copy.deepcopy(model).requires_grad_(False)
    state, scale = bank.state_dict(name), bank.scales[bank.number(name)]
    for key in [key for key in state if key.endswith("lora_A.weight")]:
        site = key.removesuffix(".lora_A.weight")
        parent, _, last = site.rpartition(".")
        base = own.get_submodule(site)
        changed = LoraLinear(base, state[key], state[f"{site}.lora_B.weight"], scale)
        setattr(own.get_submodule(parent), last, changed)
    return own


def gradients_alone(own: Any) -> dict[str, Tensor]:
    """The gradients of `alone` under the names of the bank."""
    found = {}
    for name, module in own.named_modules():
        if isinstance(module, LoraLinear):
            assert module.a.grad is not None and module.b.grad is not None
            found[f"{name}.lora_A.weight"], found[f"{name}.lora_B.weight"] = module.a.grad, module.b.grad
    return found


def gradients_of(bank: AdapterBank, name: str) -> dict[str, Tensor]:
    """The bank's gradients of one adapter, named like its state."""
    number = bank.number(name)
    found = {}
    for site in bank.sites.values():
        if site.adapted[number]:
            rows = bank.gradients[number, : bank.specs[number].rank]
            found[f"{site.name}.lora_A.weight"] = rows[:, site.shrink]
            found[f"{site.name}.lora_B.weight"] = rows[:, site.expand].T
    return found


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a task gives to a step."""

    block: TokenBlock
    targets: dict[str, Tensor] = field(default_factory=dict)


def batches(given: TokenBlocks, *, seed: int = 0) -> list[Batch]:
    """Batches with a class for every row."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            block=block,
            targets={
                "classes": torch.randint(3, (block.num_rows,), generator=generator).to(block.ids.device)
            },
        )
        for block in given
    ]


def heads(names: Sequence[str], *, device: str = "cpu", seed: int = 0) -> dict[str, nn.Module]:
    """A classifier over the first token for each task."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: nn.Linear(WIDTH, 3).to(device) for name in names}


def class_loss(head: nn.Module, states: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(head(states[:, 0]).float(), batch.targets["classes"])
