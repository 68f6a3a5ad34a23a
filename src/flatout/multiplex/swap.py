"""Run any module's linear maps as another variant for each row, and restore them.

Between `install` and `remove` a named module has another class: a subclass of its own that differs only in
`forward`.  The object, its parameters, its hooks and its place in the model stay the same, so every reference
to it sees the multiplexed module, and restoring the class leaves no trace.

The first dimension of every input must be the rows of the batch; what follows (tokens, heads) is free.

Low-rank noise goes to `nn.Linear` and to transformers' `Conv1D` (whose weight is transposed).  Vectors take
full noise: a bias is added, and a norm's weight multiplies, so each row has a vector of its own:

    linear   y + gain * vector[v]
    norm     normalised(x) * (weight + gain * vector[v])
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.multiplex.factors import Factors
from flatout.multiplex.noise.draws import FullNoise
from flatout.multiplex.products.linear import linear
from flatout.multiplex.rows import Rows, RowTables

_ATTRIBUTE = "_multiplex_change"
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class _PerRow:
    """The variant and the gain of each row for one piece of noise."""

    index: Tensor
    sign: Tensor
    scale: float
    group_size: int
    gain_of_fixed_rows: Tensor | None  # tables that may be rewritten are read at every call

    def gain(self) -> Tensor:
        return self.sign * self.scale if self.gain_of_fixed_rows is None else self.gain_of_fixed_rows


@dataclass(slots=True, eq=False)
class _Change:
    """What one module carries while it is multiplexed."""

    low_rank: tuple[Tensor, Tensor, _PerRow] | None = None
    vectors: dict[str, tuple[Tensor, _PerRow]] = field(default_factory=dict)
    plain: nn.Module | None = None  # a norm of unknown kind, to be called with other weights

    def vector(self, name: str, x: Tensor) -> Tensor | None:
        """Return gain * vector of each row in float32, shaped to go with x [rows, ..., width]."""
        if name not in self.vectors:
            return None
        values, rows = self.vectors[name]
        if len(rows.index) != x.shape[0]:
            raise BadInput(
                f"an input has {x.shape[0]} rows, and the table of variants {len(rows.index)}",
                hint="the first dimension of every input must be the rows of the batch",
            )
        gain = rows.gain()[:, None]
        own = (values[rows.index].float() * gain).masked_fill(gain.eq(0), 0)
        return own.view(x.shape[0], *(1,) * (x.ndim - 2), -1)


class Installation:
    """The multiplexed modules of a model; `remove` restores every one of them."""

    def __init__(self, changes: Mapping[nn.Module, _Change], *, parents: list[nn.Module]) -> None:
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        for module, change in changes.items():
            self._swapped.append((module, type(module)))
            module.__dict__[_ATTRIBUTE] = change
            module.__class__ = _multiplexed_class(type(module))
        # torch's encoder layers have a path that reads weights and calls no module; any hook rules it out.
        self._hooks = [parent.register_forward_pre_hook(_do_nothing) for parent in parents]

    def remove(self) -> None:
        """Restore the class of every module; a second call does nothing."""
        for module, plain in self._swapped:
            module.__class__ = plain
            module.__dict__.pop(_ATTRIBUTE, None)
        for hook in self._hooks:
            hook.remove()
        self._swapped, self._hooks = [], []


def install(
    model: nn.Module,
    factors: Mapping[str, Factors],
    rows: Rows | RowTables,
    *,
    vectors: Mapping[str, FullNoise] | None = None,
) -> Installation:
    """Multiplex the modules named in `factors`, and the parameters named in `vectors`, until `remove`.

    A name may be a stacked one (`attention.q_proj+k_proj+v_proj`): the parts share `shrink` and split
    `expand`.  Rows given as tables may be rewritten while they are in use.
    """
    modules = dict(model.named_modules())
    tables = _Tables(rows)
    changes: dict[nn.Module, _Change] = {}
    for name, factor in factors.items():
        parts = [_find(part, modules, kinds="linear") for part in _parts(name)]
        tables.check(name, num_variants=factor.num_variants)
        widths = [_widths(module)[1] for module in parts]
        if factor.expand.shape[2] != sum(widths) or any(
            factor.shrink.shape[2] != _widths(module)[0] for module in parts
        ):
            raise BadInput(
                f"factors of {name} are {factor.shrink.shape[2]} wide in and {factor.expand.shape[2]} out",
                hint=f"the module has {_widths(parts[0])[0]} in and {sum(widths)} out",
            )
        for module, expand in zip(parts, factor.expand.split(widths, dim=2), strict=True):
            change = changes.setdefault(module, _Change())
            if change.low_rank is not None:
                raise BadInput(
                    f"{name} names a module that another name already names", hint="one name per module"
                )
            change.low_rank = (
                factor.shrink,
                expand,
                tables.per_row(name, factor.shrink, factor.scale, module),
            )
    for name, noise in (vectors or {}).items():
        _add_vectors(changes, name, noise, modules=modules, tables=tables)
    return Installation(changes, parents=_parents_with_a_fast_path(modules, changes))


@contextmanager
def multiplexed(
    model: nn.Module,
    factors: Mapping[str, Factors],
    rows: Rows | RowTables,
    *,
    vectors: Mapping[str, FullNoise] | None = None,
) -> Iterator[nn.Module]:
    """Multiplex the model inside the block; restore it at the end, also when the block raises."""
    installation = install(model, factors, rows, vectors=vectors)
    try:
        yield model
    finally:
        installation.remove()


class _Tables:
    """Rows as tensors on whichever device a module lies."""

    def __init__(self, rows: Rows | RowTables) -> None:
        self._rows = rows
        self._on: dict[torch.device, RowTables] = {}
        self._gains: dict[tuple[torch.device, float], Tensor] = {}
        groups = rows.groups if isinstance(rows, Rows) else None
        self._group_size = groups.size if groups else 0

    def check(self, name: str, *, num_variants: int) -> None:
        if isinstance(self._rows, Rows) and self._rows.num_variants > num_variants:
            raise BadInput(
                f"rows name variant {self._rows.num_variants - 1}; {name} has {num_variants}",
                hint="draw factors for every variant",
            )

    def per_row(self, name: str, values: Tensor, scale: float, module: nn.Module) -> _PerRow:
        device = next(module.parameters(recurse=False)).device
        if values.device != device:
            raise BadInput(f"noise of {name} lies on {values.device}", hint=f"the module lies on {device}")
        if isinstance(self._rows, Rows):
            if device not in self._on:
                self._on[device] = self._rows.tables(device)
            tables = self._on[device]
            if (device, scale) not in self._gains:
                self._gains[device, scale] = tables.sign * scale
            return _PerRow(tables.index, tables.sign, scale, self._group_size, self._gains[device, scale])
        if self._rows.index.device != device:
            raise BadInput(f"the rows lie on {self._rows.index.device}", hint=f"{name} lies on {device}")
        return _PerRow(self._rows.index, self._rows.sign, scale, 0, None)


def _parts(name: str) -> list[str]:
    """Split a stacked name: a.q+k+v -> a.q, a.k, a.v."""
    prefix, dot, last = name.rpartition(".")
    return [f"{prefix}{dot}{part}" for part in last.split("+")]


def _find(name: str, modules: Mapping[str, nn.Module], *, kinds: Literal["linear", "vector"]) -> nn.Module:
    fits = is_linear if kinds == "linear" else takes_vectors
    module = modules.get(name)
    if module is None:
        known = [other for other, candidate in modules.items() if fits(candidate)]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise BadInput(
            f"the model has no module {name!r}",
            hint=f"near: {', '.join(near)}" if near else f"it has {len(known)} modules that could take noise",
        )
    if hasattr(module, _ATTRIBUTE):
        raise BadInput(f"{name} is already multiplexed", hint="remove the first installation before the next")
    if not fits(module):
        raise BadInput(
            f"{name} is a {type(module).__name__}",
            hint="low-rank noise goes to Linear and Conv1D, vectors also to layer and RMS norms",
        )
    return module


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly `nn.Linear` or transformers' `Conv1D`.

    A subclass may compute something else, or never be called (attention's out_proj).
    """
    kind = type(module)
    return kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")


def takes_vectors(module: nn.Module) -> bool:
    """Return whether a module's vectors can have full noise: linear maps, layer norms and RMS norms."""
    return is_linear(module) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _widths(module: nn.Module) -> tuple[int, int]:
    """Return (in, out) of a linear module."""
    weight = module.get_parameter("weight")
    return (
        (weight.shape[1], weight.shape[0])
        if isinstance(module, nn.Linear)
        else (weight.shape[0], weight.shape[1])
    )


def _add_vectors(
    changes: dict[nn.Module, _Change],
    name: str,
    noise: FullNoise,
    *,
    modules: Mapping[str, nn.Module],
    tables: _Tables,
) -> None:
    """Enter the noise of one vector parameter, or of several that are stacked in one name."""
    path, _, attribute = name.rpartition(".")
    parts = [_find(part, modules, kinds="vector") for part in _parts(path)]
    parameters = [dict(module.named_parameters(recurse=False)).get(attribute) for module in parts]
    found = [parameter for parameter in parameters if parameter is not None and parameter.ndim == 1]
    if len(found) != len(parts):
        raise BadInput(
            f"{name} is not a vector of the model", hint="full noise goes to biases and norm weights"
        )
    widths = [len(parameter) for parameter in found]
    if noise.values.ndim != 2 or noise.values.shape[1] != sum(widths):
        raise BadInput(
            f"noise of {name} is {tuple(noise.values.shape)}", hint=f"give [variants, {sum(widths)}]"
        )
    tables.check(name, num_variants=len(noise.values))
    for module, values in zip(parts, noise.values.split(widths, dim=1), strict=True):
        change = changes.setdefault(module, _Change())
        change.vectors[attribute] = (values, tables.per_row(name, values, noise.scale, module))
        if not is_linear(module) and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            change.plain = change.plain or copy.copy(module)


def _parents_with_a_fast_path(
    modules: Mapping[str, nn.Module], changes: Mapping[nn.Module, _Change]
) -> list[nn.Module]:
    return [
        module
        for module in modules.values()
        if isinstance(module, nn.TransformerEncoderLayer)
        and any(child in changes for child in module.modules())
    ]


def _do_nothing(module: nn.Module, inputs: Any) -> None:
    """Occupy a list of hooks."""


def _multiplexed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass that reads its instance's change; once, since compiled code is bound to a class."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    if kind is nn.LayerNorm or kind is nn.RMSNorm:
        forward = _torch_norm
    elif kind.__name__.endswith(("LayerNorm", "RMSNorm")):
        forward = _other_norm
    else:
        forward = _linear
    _CLASSES[kind] = type(f"Multiplex{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})
    return _CLASSES[kind]


def _linear(self: Any, x: Tensor) -> Tensor:
    change: _Change = getattr(self, _ATTRIBUTE)
    weight = self.weight if isinstance(self, nn.Linear) else self.weight.mT
    if change.low_rank is None:
        y = F.linear(x, weight, self.bias)
    else:
        shrink, expand, rows = change.low_rank
        y = linear(
            x,
            weight=weight,
            bias=self.bias,
            shrink=shrink,
            expand=expand,
            index=rows.index,
            gain=rows.gain(),
            group_size=rows.group_size,
        )
    bias = change.vector("bias", y)
    return y if bias is None else y + bias.to(y.dtype)


def _torch_norm(self: Any, x: Tensor) -> Tensor:
    """Add what the noise adds to the plain result: an unperturbed row keeps its bits."""
    change: _Change = getattr(self, _ATTRIBUTE)
    if isinstance(self, nn.LayerNorm):
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    else:
        y = F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
    weight, bias = change.vector("weight", x), change.vector("bias", x)
    if weight is not None:
        plain = F.layer_norm if isinstance(self, nn.LayerNorm) else F.rms_norm
        y = y + (plain(x, self.normalized_shape, eps=self.eps) * weight).to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _other_norm(self: Any, x: Tensor) -> Tensor:
    """Call a model's own norm with a weight for each row: any norm's formula broadcasts."""
    change: _Change = getattr(self, _ATTRIBUTE)
    assert change.plain is not None
    noise = {name: change.vector(name, x) for name in change.vectors}
    # In float32, where the noise beside a weight near 1 is not rounded away.
    own = {name: getattr(self, name).float() + value for name, value in noise.items() if value is not None}
    y: Tensor = torch.func.functional_call(change.plain, own, (x,))
    return y.to(x.dtype) if self.weight.dtype == x.dtype else y
