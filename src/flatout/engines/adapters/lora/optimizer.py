"""The optimizers of adapters that are trained together, each as if it were alone.

An adapter and its head are one *group* with an AdamW, a schedule, a norm to clip to and (in float16) a loss
scale of its own.  Modules that several tasks share, like a decoder, are one more group.  A schedule counts
updates of its group: warm-up, then a straight line that reaches 0 at its last update.  A finished adapter
leaves: it is no longer updated, and its rows need not be in the batch.

Nothing here waits for the device except the loss scales of float16, so that a whole step can be captured in a
CUDA graph; learning rates are tensors there, which are written between replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.bank import AdapterBank
from flatout.engines.adapters.settings import LearningSettings
from flatout.ground.errors import BadInput

SHARED = "shared"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings(LearningSettings):
    """How one group is trained; `num_steps` are updates, not batches."""

    num_steps: int = 1000

    def rate_at(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        warmup = int(self.warmup_share * self.num_steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * max(0.0, (self.num_steps - step) / max(1, self.num_steps - warmup))


@dataclass(kw_only=True, slots=True)
class _Group:
    """What one optimizer updates."""

    settings: StepSettings
    parameters: list[nn.Parameter]
    optimizer: torch.optim.AdamW | None  # None where there is nothing to train
    num_steps: int = 0
    active: bool = True

    def write_rate(self) -> None:
        if self.optimizer is None:
            return
        rate = self.settings.rate_at(self.num_steps)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class AdapterOptimizer:
    """An AdamW for every adapter of `bank` with its head, and one for `shared`.

    `settings` and `heads` go by the names of adapters; settings of what is shared are under "shared".  With
    `loss_scaling` every group has a loss scale; parameters that several tasks share tie them to one.
    `shared_by` are the adapters whose tasks use `shared` (None: all); it rests when none of them is active.
    """

    def __init__(
        self,
        bank: AdapterBank,
        *,
        settings: Mapping[str, StepSettings],
        heads: Mapping[str, nn.Module],
        shared: nn.Module | None = None,
        shared_by: Iterable[str] | None = None,
        loss_scaling: bool = False,
    ) -> None:
        self.bank = bank
        self._sharers = set(bank.names if shared_by is None else shared_by)
        trained = {
            name: [*bank.parameters_of(number), *_trained(heads.get(name))]
            for number, name in enumerate(bank.names)
        }
        if shared is not None:
            trained[SHARED] = _trained(shared)
        if missing := sorted(trained.keys() - settings.keys()):
            raise BadInput(f"no settings for {', '.join(missing)}", hint="give every adapter its own")
        self._device = bank.device
        self._groups = {
            name: _Group(
                settings=settings[name],
                parameters=parameters,
                optimizer=self._adamw(parameters, settings[name]) if parameters else None,
            )
            for name, parameters in trained.items()
        }
        self._others = [
            *(one for name in bank.names for one in _trained(heads.get(name))),
            *_trained(shared),
        ]
        self._scalers: dict[str, torch.amp.GradScaler] = {}
        if loss_scaling:
            tied = torch.amp.GradScaler(bank.device.type) if shared is not None else None
            for name in trained:
                self._scalers[name] = tied or torch.amp.GradScaler(bank.device.type)

    @property
    def active(self) -> tuple[str, ...]:
        """The adapters that still train."""
        return tuple(name for name in self.bank.names if self._groups[name].active)

    @property
    def scales_losses(self) -> bool:
        """Whether an update reads a flag of the device, as loss scaling does."""
        return bool(self._scalers)

    def finish(self, name: str) -> None:
        """Let an adapter leave: its parameters no longer change."""
        self.bank.number(name)
        self._groups[name].active = False

    def num_steps(self, name: str) -> int:
        """Return how many updates a group has had."""
        return self._groups[name].num_steps

    def rate(self, name: str) -> float:
        """Return the learning rate of a group's next update."""
        group = self._groups[name]
        return group.settings.rate_at(group.num_steps)

    def scaled(self, name: str, loss: Tensor) -> Tensor:
        """Scale a loss for its backward."""
        return self._scalers[name].scale(loss) if self._scalers else loss

    def write_rates(self) -> None:
        """Write the learning rates of the next update: before `update`, and before a replay of it."""
        for group in self._groups.values():
            group.write_rate()

    def count(self, names: Iterable[str]) -> None:
        """Count an update of these groups: after `update`, and after a replay of it."""
        for name in self._updated(names):
            self._groups[name].num_steps += 1

    def gradients(self, names: Iterable[str]) -> list[Tensor]:
        """Return the gradients that an update of these adapters reads; processes sum them before it."""
        found = []
        for name in self._updated(names):
            for parameter in self._groups[name].parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def update(self, names: Iterable[str]) -> None:
        """Clip and update these adapters and the shared group; then zero every gradient."""
        updated = [name for name in self._updated(names) if self._groups[name].optimizer is not None]
        if self._scalers:
            self.gradients(names)  # only gradients that exist can be unscaled
            self._update_scaled(updated)
        else:
            _update_if_finite([self._groups[name] for name in updated])
        self.zero_gradients()

    def _update_scaled(self, updated: list[str]) -> None:
        for name in updated:
            group, scaler = self._groups[name], self._scalers[name]
            assert group.optimizer is not None
            scaler.unscale_(group.optimizer)
            torch.nn.utils.clip_grad_norm_(group.parameters, group.settings.clip, foreach=True)
            scaler.step(group.optimizer)
        for scaler in {id(one): one for one in (self._scalers[name] for name in updated)}.values():
            scaler.update()

    def zero_gradients(self) -> None:
        """Zero the bank's gradients in one kernel, and those of heads and the shared group in place."""
        self.bank.zero_gradients()
        others = [parameter.grad for parameter in self._others if parameter.grad is not None]
        if others:
            torch._foreach_zero_(others)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything but the parameters: tensors under flat names, and numbers for JSON."""
        tensors: dict[str, Tensor] = {}
        for name, group in self._groups.items():
            for number, parameter in enumerate(group.parameters):
                kept = group.optimizer.state.get(parameter, {}) if group.optimizer else {}
                tensors |= {f"{name}.{number}.{key}": value for key, value in kept.items()}
        return tensors, {
            "num_steps": {name: group.num_steps for name, group in self._groups.items()},
            "active": list(self.active),
            "scalers": {name: scaler.state_dict() for name, scaler in self._scalers.items()},
        }

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from `state`; raise BadInput if it belongs to another optimizer."""
        if numbers["num_steps"].keys() != self._groups.keys():
            raise BadInput(
                f"the state has {', '.join(numbers['num_steps'])}; this run has {', '.join(self._groups)}",
                hint="resume with the tasks that the run started with",
            )
        left = dict(tensors)
        for name, group in self._groups.items():
            group.num_steps = int(numbers["num_steps"][name])
            group.active = name == SHARED or name in numbers["active"]
            for number, parameter in enumerate(group.parameters):
                self._load_parameter(f"{name}.{number}.", parameter, group, left)
        if left:
            raise BadInput(
                f"the state has {len(left)} tensors that this run lacks, first {min(left)}",
                hint="resume with the heads that the run started with",
            )
        for name, scaler in self._scalers.items():
            scaler.load_state_dict(numbers["scalers"][name])
        self.zero_gradients()

    def _load_parameter(
        self, prefix: str, parameter: nn.Parameter, group: _Group, left: dict[str, Tensor]
    ) -> None:
        """Take the entries of one parameter out of `left`, into tensors that a captured graph may read."""
        assert group.optimizer is not None
        kept = group.optimizer.state[parameter]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = left.pop(prefix + key, None)
            if value is None:
                continue
            expected = () if key == "step" else parameter.shape
            if value.shape != expected:
                raise BadInput(
                    f"{prefix}{key} is {tuple(value.shape)}; this run has {tuple(expected)}",
                    hint="resume with the ranks and heads that the run started with",
                )
            if key in kept:
                kept[key].copy_(value)
            else:
                kept[key] = value.to(device=parameter.device, dtype=torch.float32, copy=True)

    def _updated(self, names: Iterable[str]) -> list[str]:
        """Return the groups of an update, in their own order."""
        wanted = {name for name in names if self._groups[name].active}
        if wanted & self._sharers:
            wanted.add(SHARED)
        return [name for name in self._groups if name in wanted]

    def _adamw(self, parameters: list[nn.Parameter], settings: StepSettings) -> torch.optim.AdamW:
        cuda = self._device.type == "cuda"
        rate = settings.lr
        return torch.optim.AdamW(
            parameters,
            lr=torch.tensor(rate, device=self._device) if cuda else rate,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=cuda,
        )


def _trained(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else [one for one in module.parameters() if one.requires_grad]


def _update_if_finite(groups: list[_Group]) -> None:
    """Clip and step every group except those whose gradients' norm is not finite.

    Adapters share products, which multiply foreign factors by zero, and zero times infinity is NaN.  So no
    parameter may become infinite or NaN: one adapter that diverges would end all of them.

    The norms of all groups are taken together, and AdamW clips while it reads the gradients, as it takes back
    the scale of a GradScaler: a dozen launches for all, and nothing waits for the device.
    """
    gradients = [
        [parameter.grad for parameter in group.parameters if parameter.grad is not None] for group in groups
    ]
    stepping = [(group, own) for group, own in zip(groups, gradients, strict=True) if own]
    if not stepping:
        return
    each = torch.stack(torch._foreach_norm([one for _, own in stepping for one in own]))
    norms = torch._foreach_norm(each.split([len(own) for _, own in stepping]))
    whole = torch.stack(norms)
    is_not_finite = (whole - whole).isnan().float().unbind()
    divisors = torch._foreach_add(norms, 1e-6)
    torch._foreach_mul_(divisors, [1 / group.settings.clip for group, _ in stepping])
    torch._foreach_clamp_min_(divisors, 1.0)
    for (group, _), divisor, skips in zip(stepping, divisors, is_not_finite, strict=True):
        optimizer: Any = group.optimizer
        optimizer.grad_scale, optimizer.found_inf = divisor, skips
        optimizer.step()
