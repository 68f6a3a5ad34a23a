"""The fp32 copy of the weights that learns, and its optimizer.

One step of evolution moves a weight by far less than bfloat16 can resolve: added to a bf16 weight it rounds
away, step after step, and nothing is learned.  So the sum is kept in fp32 (the *master*), and the model gets
its rounding after each step.  A weight that is fp32 already is its own master: no copy.

The optimizer is torch's own, one instance per stack of matrices, so that an update can be streamed: the
gradients of one stack exist at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch

from flatout.engines.evolution.update.directions import direction
from flatout.ground.decisions import Decision
from flatout.ground.errors import BadInput
from flatout.ground.units import show_bytes
from flatout.multiplex.kernels import HAS_TRITON
from flatout.multiplex.noise.draws import FullNoise

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.engines.evolution.population.weights import Names
    from flatout.engines.evolution.update.directions import Coefficients, Draw

OptimizerName = Literal["sgd", "adamw"]
MastersPlace = Literal["auto", "device", "cpu"]
# Of the free device memory: the cache and the factors of a population need the rest.
LARGEST_SHARE = 0.25
MOMENTS = {"sgd": 0, "adamw": 2}


class Masters:
    """fp32 masters of `weights` by name; `step` moves one of `stacks` and writes the model's weights."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        stacks: Sequence[Names],
        lr: float,
        optimizer: OptimizerName = "sgd",
        weight_decay: float = 0.0,
        place: MastersPlace = "auto",
        divisor: float = 1.0,
        fused: bool = False,
    ) -> None:
        """Divide the sum over variants by `divisor`: members times sigma, which noise carries.

        `fused` takes direction and step in one kernel where it can: its noise is int8.
        """
        if optimizer not in get_args(OptimizerName):
            raise BadInput(f"no optimizer {optimizer!r}", hint=f"one of {', '.join(get_args(OptimizerName))}")
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        self.place = choose_place(self._weights, optimizer=optimizer, place=place)
        self._masters = {name: self._master(weight) for name, weight in self._weights.items()}
        self._optimizers = {
            names: _optimizer(self._masters_of(names), kind=optimizer, lr=lr, weight_decay=weight_decay)
            for names in stacks
        }
        # Without decay SGD is one addition: the optimizer's bookkeeping would cost more.
        self._only_added = lr if optimizer == "sgd" and weight_decay == 0 else None
        self._divisor, self._fused = divisor, fused
        self._addresses: dict[Names, Tensor | None] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._masters[name].detach()

    def set_lr(self, lr: float) -> None:
        """Change the step size."""
        if self._only_added is not None:
            self._only_added = lr
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def direction(self, draw: Draw, coefficients: Coefficients) -> Tensor:
        """Return the direction in which fitness grows."""
        return direction(draw, coefficients.device / self._divisor)

    @torch.no_grad()
    def step(self, names: Names, ascent: Tensor) -> Tensor:
        """Move a stack along `ascent` [matrices, ...], the direction in which fitness grows.

        The squares of the norms of the ascent, of the move and of the moved masters, [3]: still on the
        device, as reading them would make the host wait once per stack.
        """
        masters = self._masters_of(names)
        ascent = ascent.to(masters[0])
        ascents, length = list(ascent.unbind()), squares(ascent)
        if self._only_added is not None:
            torch._foreach_add_(masters, ascents, alpha=self._only_added)
            moved = length * self._only_added**2
        else:
            before = torch.stack(masters)
            for master, own in zip(masters, ascents, strict=True):
                master.grad = own
            self._optimizers[names].step()
            self._optimizers[names].zero_grad()
            moved = squares(before.sub_(torch.stack(masters)))
        weights = self._weights_of(names)
        if weights[0].data_ptr() != masters[0].data_ptr():
            torch._foreach_copy_(weights, masters)
        return torch.stack((length, moved, squares(torch.stack(torch._foreach_norm(masters)))))

    @torch.no_grad()
    def step_at_once(self, names: Names, draw: Draw, coefficients: Coefficients) -> Tensor | None:
        """Compute direction and step in one kernel; return what `step` does, or None if no kernel can."""
        if (addresses := self._addresses_of(names)) is None:
            return None
        noise = draw(range(len(coefficients.host)))
        assert not isinstance(noise, FullNoise) and self._only_added is not None
        from flatout.engines.evolution.update.ascend import ascend

        return ascend(
            addresses,
            noise,
            gains=coefficients.gains,
            unit=coefficients.largest / self._divisor * noise.scales[0],
            lr=self._only_added,
            like=self._weights[names[0]],
        )

    def _addresses_of(self, names: Names) -> Tensor | None:
        """Return the addresses of a stack for the kernel; None if it cannot move the stack."""
        master = self._masters[names[0]]
        if not (HAS_TRITON and self._fused and self._only_added is not None):
            return None
        if master.device.type != "cuda" or master.ndim != 2:
            return None
        if names not in self._addresses:
            from flatout.engines.evolution.update.ascend import address_table

            self._addresses[names] = address_table(self._masters_of(names), self._weights_of(names))
        return self._addresses[names]

    def tensors(self) -> dict[str, Tensor]:
        """Return everything a resumed run needs, by flat names."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found[f"master/{name}"] = master.detach()
        for names, optimizer in self._optimizers.items():
            for name in names:
                for key, value in optimizer.state[self._masters[name]].items():
                    if value is not None:  # SGD without momentum lists an empty buffer
                        found[f"optimizer/{key}/{name}"] = torch.as_tensor(value)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned in another process."""
        for name, master in self._masters.items():
            saved = tensors.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                shape = None if saved is None else tuple(saved.shape)
                raise BadInput(
                    f"the checkpoint has {name} as {shape}, the model as {tuple(master.shape)}",
                    hint="resume with the model and the targets of the run",
                )
            master.copy_(saved)
            self._weights[name].copy_(master)
        for names, optimizer in self._optimizers.items():
            for name in names:
                optimizer.state[self._masters[name]].clear()
        owners = {name: optimizer for names, optimizer in self._optimizers.items() for name in names}
        for flat, value in tensors.items():
            kind, _, rest = flat.partition("/")
            key, _, name = rest.partition("/")
            if kind == "optimizer" and name in owners:
                master = self._masters[name]
                # The count of steps too: on a GPU AdamW is fused and counts there.
                owners[name].state[master][key] = value.to(master, copy=True)

    def _masters_of(self, names: Names) -> list[Tensor]:
        return [self._masters[name] for name in names]

    def _weights_of(self, names: Names) -> list[Tensor]:
        return [self._weights[name] for name in names]

    def _master(self, weight: Tensor) -> torch.nn.Parameter:
        device = weight.device if self.place.value == "device" else torch.device("cpu")
        return torch.nn.Parameter(weight.to(device=device, dtype=torch.float32), requires_grad=True)


def squares(values: Tensor) -> Tensor:
    """Return the square of the norm, without a copy of `values`: they are as large as the model."""
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.square()


def choose_place(
    weights: Mapping[str, Tensor], *, optimizer: OptimizerName, place: MastersPlace = "auto"
) -> Decision[Literal["device", "cpu"]]:
    """Choose where the masters live: with the model if they take at most a quarter of its free memory."""
    if place != "auto":
        return Decision(value=place, reason="as asked", source="assumed")
    device = next(iter(weights.values())).device
    if device.type == "cpu":
        return Decision(value="device", reason="the model is on the CPU", source="computed")
    needed_bytes = sum(4 * weight.numel() * (1 + MOMENTS[optimizer]) for weight in weights.values())
    free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
    shown = f"masters and moments take {show_bytes(needed_bytes)} of {show_bytes(free_bytes)} free"
    if needed_bytes <= LARGEST_SHARE * free_bytes:
        return Decision(value="device", reason=shown, source="measured")
    reason = f"{shown}, over {LARGEST_SHARE:.0%}: a population needs the memory more"
    return Decision(value="cpu", reason=reason, source="measured")


def _optimizer(
    masters: Sequence[Tensor], *, kind: OptimizerName, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    fused = kind == "adamw" and masters[0].device.type == "cuda"
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    return make(masters, lr=lr, weight_decay=weight_decay, foreach=not fused, fused=fused, maximize=True)
