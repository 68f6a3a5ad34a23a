"""The factors of all adapters in one buffer, and their gradients in another.

An adapter changes a linear map W [out, in] to W + scale * B^T A, with A [rank, in] and B [rank, out].  Seen
from the buffer, rank is the outer dimension: row (t, r) holds the r-th rows of A and B of *every* adapted
linear map of adapter t, side by side.

    factors [T, R, width]      width = sum over linear maps of in + out, R the largest rank

Three things follow.  A linear map's factors of all adapters are one strided view [T, R, in], and [T * R, in]
as well, so every kind of product reads them where they lie.  An adapter is one contiguous piece, so its
optimizer updates one tensor, clips one norm and zeroes one range.  And one kernel casts the whole bank to the
encoder's precision, once a step.

An adapter of a smaller rank leaves rows of zeros.  They stay zero: the gradient of a row of A is a product
with the same row of B, and the other way round, so both vanish where both are zero.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput, near_hint
from flatout.ground.units import round_up
from flatout.multiplex.products.trained import Maps

DEFAULT_TARGETS = (
    "query",
    "key",
    "value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
ALIGNMENT = 16  # elements: grouped products want rows that begin at multiples of 16 bytes in any precision


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """One adapter: `targets` are endings of module names, as in PEFT; rank 0 means no adapter."""

    name: str
    rank: int
    alpha: float | None = None  # twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = DEFAULT_TARGETS

    def __post_init__(self) -> None:
        """Check every field, and name all that are wrong."""
        wrong = []
        if not self.name or "." in self.name or "/" in self.name:
            wrong.append(f"name {self.name!r} must not be empty nor hold dots or slashes")
        if self.rank < 0:
            wrong.append(f"rank {self.rank} is negative")
        if not 0.0 <= self.dropout < 1.0:
            wrong.append(f"dropout {self.dropout} is not in [0, 1)")
        if not self.targets:
            wrong.append("there are no targets")
        if wrong:
            raise BadInput(f"adapter {self.name!r}: {'; '.join(wrong)}", hint="correct its settings")

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by: alpha / rank."""
        if not self.rank:
            return 0.0
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank

    def matches(self, module_name: str) -> bool:
        return any(module_name == target or module_name.endswith(f".{target}") for target in self.targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSite:
    """One adapted linear map: where its factors lie in a row of the bank."""

    name: str
    num_in: int
    num_out: int
    start: int
    adapted: tuple[bool, ...] = field(repr=False)  # by which adapters

    @property
    def shrink(self) -> slice:
        return slice(self.start, self.start + self.num_in)

    @property
    def expand(self) -> slice:
        begin = self.start + round_up(self.num_in, ALIGNMENT)
        return slice(begin, begin + self.num_out)

    @property
    def stop(self) -> int:
        return self.start + round_up(self.num_in, ALIGNMENT) + round_up(self.num_out, ALIGNMENT)


class AdapterBank:
    """Factors and gradients of `specs` on the linear maps of `model` that they target.

    `factors` and `gradients` are float32 [T, R, width]; products read `working`, which is `factors` itself
    in float32 and a copy in `dtype` otherwise, written by `refresh`.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[AdapterSpec],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        if not specs or len(set(names)) < len(names):
            raise BadInput(
                f"the adapters are named {', '.join(names)}" if names else "there is no adapter",
                hint="give at least one, each with its own name",
            )
        self.specs = tuple(specs)
        self.names = tuple(names)
        self.sites = _sites(model, self.specs)
        self.rank = max(spec.rank for spec in specs)
        place = torch.device(device) if device is not None else next(model.parameters()).device
        self.dtype = dtype
        stops = [site.stop for site in self.sites.values()]
        # One unit more, so that rows do not begin at multiples of a page, which caches map together.
        self.width = max(stops, default=0) + ALIGNMENT
        shape = (len(specs), self.rank, self.width)
        self.factors = torch.zeros(shape, device=place)
        self.device = self.factors.device  # with its number
        self.gradients = torch.zeros(shape, device=self.device)
        own = dtype == torch.float32
        self.working = self.factors if own else torch.zeros(shape, dtype=dtype, device=self.device)
        self.scales = tuple(spec.scale for spec in specs)
        self.initialise(seed)
        self._parameters = [self._parameter(number) for number in range(len(specs))]

    def __len__(self) -> int:
        return len(self.specs)

    def number(self, name: str) -> int:
        """Return the number of an adapter by its name."""
        if name not in self.names:
            raise BadInput(f"no adapter {name!r}", hint=near_hint(name, self.names))
        return self.names.index(name)

    def parameters_of(self, adapter: int) -> list[nn.Parameter]:
        """Return what the optimizer of an adapter updates: a flat tensor whose `.grad` is in `gradients`."""
        parameter = self._parameters[adapter]
        return [] if parameter is None else [parameter]

    def maps(
        self, sites: Sequence[AdapterSite], *, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Maps:
        """Return linear maps of one input with their factors: one map, or several that are `stackable`.

        Weights of several are copied into one; the factors are views.
        """
        first, num = sites[0], len(sites)
        step = sites[1].start - first.start if num > 1 else 0

        def view(of: Tensor, part: slice) -> Tensor:
            shape = (num, len(self), self.rank, part.stop - part.start)
            return of.as_strided(shape, (step, self.rank * self.width, self.width, 1), part.start)

        known = [bias for bias in biases if bias is not None]
        return Maps(
            weight=weights[0] if num == 1 else torch.cat([weight.detach() for weight in weights]),
            bias=biases[0] if num == 1 else torch.cat(known).detach() if len(known) == num else None,
            shrink=view(self.working, first.shrink),
            expand=view(self.working, first.expand),
            shrink_gradient=view(self.gradients, first.shrink),
            expand_gradient=view(self.gradients, first.expand),
        )

    def refresh(self) -> None:
        """Cast the factors to the precision of products: one kernel for the whole bank."""
        if self.working is not self.factors:
            self.working.copy_(self.factors)

    def zero_gradients(self) -> None:
        self.gradients.zero_()

    def initialise(self, seed: int) -> None:
        """Draw A as PEFT does and set B to zero: every adapter begins as the plain model.

        Each factor is drawn from a seed made of its names, so that adding an adapter or a target changes no
        other.
        """
        self.factors.zero_()
        for number, spec in enumerate(self.specs):
            for site in self.sites.values():
                if not site.adapted[number]:
                    continue
                key = blake2b(f"{seed}/{spec.name}/{site.name}".encode(), digest_size=7).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
                drawn = torch.rand(spec.rank, site.num_in, generator=generator)
                bound = 1.0 / math.sqrt(site.num_in)  # kaiming_uniform with a = sqrt(5)
                self.factors[number, : spec.rank, site.shrink] = (drawn * 2 - 1).mul_(bound).to(self.device)
        self.refresh()

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """Return one adapter under PEFT's names: lora_A.weight [rank, in], lora_B.weight [out, rank]."""
        number = self.number(name)
        rank = self.specs[number].rank
        found = {}
        for site in self.sites.values():
            if site.adapted[number]:
                rows = self.factors[number, :rank]
                found[f"{site.name}.lora_A.weight"] = rows[:, site.shrink].clone()
                found[f"{site.name}.lora_B.weight"] = rows[:, site.expand].T.contiguous()
        return found

    def load_state_dict(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Load one adapter's factors; every tensor must be there and fit, or nothing changes."""
        number = self.number(name)
        expected = {key: tensor.shape for key, tensor in self.state_dict(name).items()}
        missing, foreign = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or foreign:
            raise BadInput(
                f"adapter {name!r}: {len(missing)} tensors are missing ({', '.join(missing[:2])}),"
                f" {len(foreign)} are foreign ({', '.join(foreign[:2])})",
                hint="the adapter was made for other targets or another model",
            )
        for key, shape in expected.items():
            if state[key].shape != shape:
                raise BadInput(
                    f"{key} of adapter {name!r} is {tuple(state[key].shape)}; this bank has {tuple(shape)}",
                    hint="give the adapter the rank and the model it was made with",
                )
        rank = self.specs[number].rank
        with torch.no_grad():
            for site in self.sites.values():
                if site.adapted[number]:
                    rows = self.factors[number, :rank]
                    rows[:, site.shrink] = state[f"{site.name}.lora_A.weight"].to(rows)
                    rows[:, site.expand] = state[f"{site.name}.lora_B.weight"].to(rows).T
        self.refresh()

    def _parameter(self, number: int) -> nn.Parameter | None:
        rank = self.specs[number].rank
        if not rank:
            return None
        parameter = nn.Parameter(self.factors[number, :rank].view(-1))
        parameter.grad = self.gradients[number, :rank].view(-1)
        return parameter


def stackable(sites: Sequence[AdapterSite]) -> bool:
    """Return whether maps have one shape and their factors lie at equal distances."""
    first = sites[0]
    step = sites[1].start - first.start if len(sites) > 1 else 0
    return len(sites) > 1 and all(
        (site.num_in, site.num_out) == (first.num_in, first.num_out)
        and site.start == first.start + place * step
        for place, site in enumerate(sites)
    )


def _sites(model: nn.Module, specs: Sequence[AdapterSpec]) -> dict[str, AdapterSite]:
    """Find every linear map that some adapter targets, in the order of the model."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for spec in specs:
        for target in spec.targets:
            if not any(name == target or name.endswith(f".{target}") for name in linears):
                raise BadInput(
                    f"adapter {spec.name!r} targets {target!r}, which no linear map of the model ends with",
                    hint=_near(target, linears),
                )
    sites: dict[str, AdapterSite] = {}
    start = 0
    for name, module in linears.items():
        adapted = tuple(spec.rank > 0 and spec.matches(name) for spec in specs)
        if any(adapted):
            sites[name] = AdapterSite(
                name=name,
                num_in=module.in_features,
                num_out=module.out_features,
                start=start,
                adapted=adapted,
            )
            start = sites[name].stop
    return sites


def _near(target: str, linears: Mapping[str, Any] | Iterable[str]) -> str:
    """Suggest the endings of the model's linear maps that are nearest to the one asked for."""
    endings: dict[str, None] = {}
    for name in linears:
        parts = [part for part in name.split(".") if not part.isdigit()]
        for count in (1, 2, 3):
            endings[".".join(parts[-count:])] = None
    near = difflib.get_close_matches(target, list(endings), n=3, cutoff=0.3)
    return f"near: {', '.join(near)}" if near else f"there are {', '.join(list(endings)[:6])}"
