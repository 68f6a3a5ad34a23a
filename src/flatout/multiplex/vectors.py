"""A vector for each row, added to what a layer gives.

Steering adds a direction to the residual stream after a layer.  Trials of different directions and strengths
differ in nothing else, so they share one batch: row i adds gain[i] * table[variant[i]].  A forward hook does
it: the model is not changed, and removing the hooks leaves no trace of them.

Layers give a tensor [rows, ..., width] or a tuple that begins with one.  A row of gain 0, and a position
outside the mask, keeps the bits of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatout.ground.errors import BadInput
from flatout.multiplex.rows import Rows, RowTables


@contextmanager
def steered(
    layers: Mapping[str, nn.Module],
    table: Tensor,
    rows: Rows | RowTables,
    *,
    alpha: float | Tensor = 1.0,
    positions: Tensor | Callable[[], Tensor] | None = None,
) -> Iterator[None]:
    """Add alpha * sign * table[variant of the row] to the output of each layer, for the length of a block.

    `table` is [variants, width], the same at every layer, or [layers, variants, width] in the order of
    `layers`.  A single row stands for every row of a batch.  `alpha` may be one number for each row.
    `positions` [rows, tokens] says where to add: True or not 0; a function is asked at every call.  Rows
    given as tables, and `positions`, may be rewritten while they are in use.
    """
    table = table.detach()  # a hook that stays must not keep the graph that made the vectors alive
    of_layers = _of_layers(table, num_layers=len(layers))
    tables = rows.tables(table.device) if isinstance(rows, Rows) else rows
    if isinstance(rows, Rows) and rows.num_variants > table.shape[-2]:
        raise BadInput(
            f"rows name variant {rows.num_variants - 1}; the table has {table.shape[-2]}",
            hint="give a vector for every variant",
        )
    if isinstance(alpha, Tensor) and alpha.shape != tables.sign.shape:
        raise BadInput(
            f"alpha is {tuple(alpha.shape)} for {len(tables.sign)} rows", hint="one number, or one per row"
        )
    with ExitStack() as hooks:
        for (name, layer), vectors in zip(layers.items(), of_layers, strict=True):
            steer = _Steer(name, vectors, tables, alpha=alpha, positions=positions)
            steer.owns_tables = isinstance(rows, Rows)
            hooks.enter_context(layer.register_forward_hook(steer))
        yield


class _Steer:
    """The hook of one layer."""

    def __init__(
        self,
        name: str,
        vectors: Tensor,
        tables: RowTables,
        *,
        alpha: float | Tensor,
        positions: Tensor | Callable[[], Tensor] | None,
    ) -> None:
        self.name = name
        self.vectors = vectors
        self.tables = tables
        self.owns_tables = False  # nobody else writes into them
        self.alpha = alpha.detach() if isinstance(alpha, Tensor) else alpha
        self.positions = positions

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return with_hidden(output, self.add, name=self.name)

    def add(self, hidden: Tensor) -> Tensor:
        """Add each row's vector to hidden states [rows, ..., width]."""
        num_rows, width = len(self.tables.index), self.vectors.shape[-1]
        if num_rows not in (1, hidden.shape[0]) or hidden.shape[-1] != width:
            raise BadInput(
                f"layer {self.name} gives {tuple(hidden.shape)}",
                hint=f"{num_rows} rows of vectors {width} wide are to be added",
            )
        place = hidden.device
        if self.vectors.device != place:  # once: later calls find them in place
            self.vectors = self.vectors.to(place)
            if self.owns_tables:
                self.tables = RowTables(index=self.tables.index.to(place), sign=self.tables.sign.to(place))
        gain = (self.tables.sign.to(place) * self.alpha)[:, None]
        own = (self.vectors[self.tables.index.to(place)] * gain).to(hidden.dtype)
        where = self.chosen(gain, hidden)
        # Chosen, not multiplied by 0: a row that is left alone keeps its bits, whatever its vector holds.
        ones = (1,) * (hidden.ndim - 2)
        return torch.where(where.view(*where.shape, *ones), hidden + own.view(num_rows, *ones, width), hidden)

    def chosen(self, gain: Tensor, hidden: Tensor) -> Tensor:
        """Return where to add: [rows, 1], or [rows, tokens] with a mask of positions."""
        if self.positions is None:
            return gain.ne(0)
        positions = self.positions if isinstance(self.positions, Tensor) else self.positions()
        if hidden.ndim != 3 or positions.shape != hidden.shape[:2]:
            raise BadInput(
                f"positions are {tuple(positions.shape)}; layer {self.name} gives {tuple(hidden.shape)}",
                hint="give [rows, tokens] of the call",
            )
        return gain.ne(0) & positions.to(hidden.device).ne(0)


def with_hidden(output: Any, change: Callable[[Tensor], Tensor], *, name: str) -> Any:
    """Change the hidden states in a layer's output: a tensor, or a tuple that begins with one."""
    if isinstance(output, Tensor):
        return change(output)
    if not isinstance(output, tuple) or not output or not isinstance(output[0], Tensor):
        raise BadInput(
            f"layer {name} gives a {type(output).__name__}",
            hint="steer a layer that gives a tensor, or a tuple that begins with one",
        )
    make = getattr(output, "_make", tuple)  # a named tuple keeps its names
    return make((change(output[0]), *output[1:]))


def _of_layers(table: Tensor, *, num_layers: int) -> list[Tensor]:
    """Return the [variants, width] of each layer."""
    if table.ndim == 2:
        return [table] * num_layers
    if table.ndim != 3 or len(table) != num_layers:
        raise BadInput(
            f"the table is {tuple(table.shape)} for {num_layers} layers",
            hint="give [variants, width] or [layers, variants, width]",
        )
    return list(table)
