"""Each thing that a step of the adapters does, against its plain form, as one number with a limit.

    python benchmarks/adapters/verify.py                     # all of them, on a GPU where there is one
    python benchmarks/adapters/verify.py scaling --device cpu

one-pass       five adapters in one pass against each alone: the largest difference of a gradient, as a share
accumulation   two half batches against the whole one: the same
clipping       the norm of the gradient that AdamW got, over the norm that it was to be clipped to
scaling        gradients in float16 with a loss scale against those in float32: the same, and without one

Exits with 1 where a number is beyond its limit.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from arms import Batch, batches, class_heads, class_loss
from models import NAMES, LoraLinear, build, specs, with_one_adapter

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.fused_step import AdapterOptimizer, FusedStep, StepSettings

TOKENS, VOCABULARY, CLIP = 512, 2000, 0.05
SMALL_LOSS = (
    1e-5  # a loss whose gradients are below what float16 can hold, as in the middle of a long training
)
LIMITS = {"one-pass": 1e-3, "accumulation": 1e-4, "clipping": 1e-3, "scaling": 2e-2}


class Step:
    """One update of five adapters; `gradients` are what it read, by adapter."""

    def __init__(
        self,
        device: str,
        *,
        dtype: torch.dtype = torch.float32,
        accumulation: int = 1,
        clip: float = math.inf,
        scaled: bool = False,
        share: float = 1.0,
    ) -> None:
        model = build("small", folder=None, device=device, dtype=dtype)
        bank = AdapterBank(model, specs(), dtype=dtype, device=device)
        torch.manual_seed(0)
        for name in NAMES:  # with second factors that are not zero, so that first ones have gradients
            drawn = {key: 0.05 * torch.randn_like(value) for key, value in bank.state_dict(name).items()}
            bank.load_state_dict(name, drawn)
        self.bank, self.heads = bank, class_heads(model.config.hidden_size, device)
        self.optimizer = AdapterOptimizer(
            bank,
            settings={name: StepSettings(num_steps=100, clip=clip) for name in NAMES},
            heads=self.heads,
            loss_scaling=scaled,
        )
        self.gradients = torch.empty(0)

        update = self.optimizer.update

        def keep_and_update(present: set[str]) -> None:
            scale = self.optimizer.scaled(NAMES[0], torch.ones((), device=device))
            self.gradients = self.bank.gradients.clone() / scale / share
            update(present)

        self.optimizer.update = keep_and_update  # type: ignore[method-assign]
        self.step = FusedStep(
            PackedEncoder(model, bank, dtype=dtype),
            optimizer=self.optimizer,
            loss=lambda adapter, states, batch: share * class_loss(self.heads[NAMES[adapter]], states, batch),
            accumulation=accumulation,
            graph="off",
        )

    def __call__(self, *given: Sequence[Batch]) -> Tensor:
        for one in given:
            self.step(one)
        return self.gradients


def off_by(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def one_pass(device: str) -> dict[str, float]:
    given, together = rows(device), Step(device)
    before = [together.bank.state_dict(name) for name in NAMES]
    heads = copy.deepcopy(together.heads)
    found = together(given)
    worst = 0.0
    for number, batch in enumerate(given):
        model = build("small", folder=None, device=device, dtype=torch.float32)
        alone = with_one_adapter(model, specs()[number])
        for name, module in alone.named_modules():
            if isinstance(module, LoraLinear):
                module.a.data.copy_(before[number][f"{name}.lora_A.weight"])
                module.b.data.copy_(before[number][f"{name}.lora_B.weight"])
        states = alone(input_ids=batch.block.ids).last_hidden_state
        class_loss(heads[NAMES[number]], states, batch).backward()
        modules = dict(alone.named_modules())
        expected = torch.zeros_like(found[number])
        for site in together.bank.sites.values():
            adapted = modules[site.name]
            expected[: len(adapted.a), site.shrink] = adapted.a.grad
            expected[: len(adapted.a), site.expand] = adapted.b.grad.T
        worst = max(worst, off_by(found[number], expected))
    return {"value": worst}


def accumulation(device: str) -> dict[str, float]:
    given = rows(device)
    halves = [[half(batch, part) for batch in given] for part in (0, 1)]
    return {"value": off_by(Step(device, accumulation=2)(*halves), Step(device)(given))}


def clipping(device: str) -> dict[str, float]:
    step = Step(device, clip=CLIP)
    norms = step(rows(device)).flatten(1).norm(dim=1)
    tensors, _ = step.optimizer.state()
    worst = 0.0
    for name in NAMES:
        parts = [
            value for key, value in tensors.items() if key.startswith(f"{name}.") and key.endswith("exp_avg")
        ]
        seen = float(torch.stack([part.norm() for part in parts]).norm()) / 0.1  # 1 - beta of AdamW
        worst = max(worst, abs(seen / CLIP - 1))
    return {"value": worst, "smallest norm before": float(norms.min()), "clipped to": CLIP}


def scaling(device: str) -> dict[str, float]:
    given = rows(device)
    expected = Step(device)(given)
    half_as = {"dtype": torch.float16, "share": SMALL_LOSS}
    plain = Step(device, **half_as)(given)
    scaled = Step(device, scaled=True, **half_as)(given)
    lost = float((plain == 0).sum() - (expected == 0).sum()) / float((expected != 0).sum())
    return {
        "value": off_by(scaled, expected), "without a scale": off_by(plain, expected), "share lost": lost
    }  # fmt: skip


def rows(device: str) -> list[Batch]:
    return batches(tokens=TOKENS, vocabulary=VOCABULARY, device=device)


def half(batch: Batch, part: int) -> Batch:
    """The first or the second half of a batch's rows."""
    middle = batch.block.num_rows // 2
    own = slice(0, middle) if part == 0 else slice(middle, None)
    block = type(batch.block)(
        adapter=batch.block.adapter, ids=batch.block.ids[own], lengths=batch.block.lengths[own]
    )
    return Batch(block=block, targets={name: value[own] for name, value in batch.targets.items()})


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "one-pass": one_pass, "accumulation": accumulation, "clipping": clipping, "scaling": scaling
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    found = {}
    for name in given.checks or CHECKS:
        found[name] = CHECKS[name](given.device)
        beside = ", ".join(f"{key} {value:.3g}" for key, value in found[name].items() if key != "value")
        print(f"{name:<14}{found[name]['value']:.2e}  limit {LIMITS[name]:.0e}  {beside}")
    print(json.dumps(found))
    sys.exit(any(not found[name]["value"] <= LIMITS[name] for name in found))


if __name__ == "__main__":
    main()
