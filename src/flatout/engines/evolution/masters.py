"""The fp32 copy of the weights that learning happens on, and its optimizer.

One step of evolution moves a weight by far less than bfloat16 can resolve next to the weight itself: added to
a bf16 weight it is rounded away, step after step, and nothing is learned.  So the sum is kept in fp32 (the
*master*), and the model receives its rounding after each step.  A weight that is fp32 already is its own
master: no copy.

The optimizer is torch's own, one instance per matrix, so that an update can be streamed: one gradient exists
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import torch

from flatout.decisions import Decision
from flatout.errors import BadInput
from flatout.units import show_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.multiplex.factors import Factors

HAS_TRITON = find_spec("triton") is not None  # CUDA builds of torch bring it
OptimizerName = Literal["sgd", "adamw"]
Place = Literal["auto", "device", "cpu"]
# Of the device memory that is free: the cache and the factors of a population need the rest.
LARGEST_SHARE = 0.25
MOMENTS = {"sgd": 0, "adamw": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one step did to one matrix, as squares of norms: they add up over matrices.

    They stay on the device: reading each would make the host wait once per matrix.
    """

    moved: Tensor
    weights: Tensor


class Masters:
    """fp32 masters of `weights` by name; `step` moves one of them and writes the model's weight."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        lr: float,
        optimizer: OptimizerName = "sgd",
        weight_decay: float = 0.0,
        place: Place = "auto",
    ) -> None:
        if optimizer not in get_args(OptimizerName):
            raise BadInput(f"no optimizer {optimizer!r}", hint=f"one of {', '.join(get_args(OptimizerName))}")
        self._weights = {name: weight.detach() for name, weight in weights.items()}
        self.place = choose_place(self._weights, optimizer=optimizer, place=place)
        self._masters = {name: self._master(weight) for name, weight in self._weights.items()}
        self._optimizers = {
            name: _optimizer(master, kind=optimizer, lr=lr, weight_decay=weight_decay)
            for name, master in self._masters.items()
        }
        # Without decay SGD is one addition: the optimizer's own bookkeeping would cost more than it.
        self._only_added = lr if optimizer == "sgd" and weight_decay == 0 else None

    def __getitem__(self, name: str) -> Tensor:
        return self._masters[name].detach()

    @torch.no_grad()
    def step(self, name: str, ascent: Tensor) -> Change:
        """Move `name` along `ascent`, the direction in which fitness grows."""
        master, weight = self._masters[name], self._weights[name]
        ascent = ascent.to(master)
        if self._only_added is not None:
            master.add_(ascent, alpha=self._only_added)
            moved = _squares(ascent) * self._only_added**2
        else:
            before = master.detach().clone()
            master.grad = ascent
            self._optimizers[name].step()
            master.grad = None
            moved = _squares(before.sub_(master.detach()))
        if weight.data_ptr() != master.data_ptr():
            weight.copy_(master)
        return Change(moved=moved, weights=_squares(master.detach()))

    def moves_at_once(self, name: str, factors: Factors) -> bool:
        """Whether `step_at_once` can take the place of a direction and a `step`."""
        master, weight = self._masters[name], self._weights[name]
        on_device = HAS_TRITON and master.device.type == "cuda" and weight.is_contiguous()
        return on_device and self._only_added is not None and factors.shrink.dtype == torch.int8

    @torch.no_grad()
    def step_at_once(
        self, name: str, factors: Factors, *, gains: Tensor, unit: float
    ) -> tuple[Tensor, Change]:
        """Move `name` along sum_v unit gains[v] scale E_v, which is never formed; its norm's square first."""
        from flatout.engines.evolution.kernels.ascend import ascend

        assert self._only_added is not None
        squares = ascend(
            self._masters[name].detach(),
            self._weights[name],
            expand=factors.expand,
            shrink=factors.shrink,
            gains=gains,
            unit=unit * factors.scale,
            lr=self._only_added,
        )
        return squares[0], Change(moved=squares[0] * self._only_added**2, weights=squares[1])

    def tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, by flat names."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found[f"master/{name}"] = master.detach()
            for key, value in self._optimizers[name].state[master].items():
                if value is not None:  # SGD without momentum names a buffer that it does not have
                    found[f"optimizer/{key}/{name}"] = torch.as_tensor(value)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` returned in another process."""
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
            state = self._optimizers[name].state[master]
            state.clear()
            for flat, value in tensors.items():
                kind, _, rest = flat.partition("/")
                key, _, owner = rest.partition("/")
                if kind == "optimizer" and owner == name:
                    # AdamW counts its steps on the CPU, wherever the moments are.
                    state[key] = value.clone() if key == "step" else value.to(master, copy=True)

    def _master(self, weight: Tensor) -> torch.nn.Parameter:
        device = weight.device if self.place.value == "device" else torch.device("cpu")
        return torch.nn.Parameter(weight.to(device=device, dtype=torch.float32), requires_grad=True)


def _squares(values: Tensor) -> Tensor:
    """The square of the norm, without a copy of `values`: they are as large as the model."""
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.square()


def choose_place(
    weights: Mapping[str, Tensor], *, optimizer: OptimizerName, place: Place = "auto"
) -> Decision[Literal["device", "cpu"]]:
    """Where the masters live: beside the model if a quarter of what is free there holds them."""
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
    reason = f"{shown}, over {LARGEST_SHARE:.0%}: a population needs the room more"
    return Decision(value="cpu", reason=reason, source="measured")


def _optimizer(
    master: torch.nn.Parameter, *, kind: OptimizerName, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD([master], lr=lr, weight_decay=weight_decay, foreach=False, maximize=True)
    fused = master.device.type == "cuda"
    return torch.optim.AdamW(
        [master], lr=lr, weight_decay=weight_decay, foreach=False, fused=fused, maximize=True
    )
