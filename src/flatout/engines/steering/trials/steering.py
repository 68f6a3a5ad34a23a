"""What one trial does to the residual stream, and the tables that do it for many trials at once.

A layer's output h [D] is changed along a direction u: added to, cleared of it (`project-out`), set to a given
component (`clamp`), or turned towards it at its own length (`norm-preserving`).  Only `add` is the same
vector whatever h is, so only `add` can ride in a captured step through a table of vectors; the others are
computed from h where answers are scored, and by a hook where texts are generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.engines.steering.settings import Mode, Turn, Where
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.multiplex.models.decoder import Decoder

MODES: tuple[Mode, ...] = ("add", "project-out", "clamp", "norm-preserving")
WHERE: tuple[Where, ...] = ("last-and-generated", "all", "generated")
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steering:
    """A change of what layer `layer` (from 0) gives, along `direction` [D].

    `amount` is absolute.  `add` adds the direction this many times.  `project-out` removes this share of the
    component along it, 1 for all.  `clamp` sets the component to this.  `norm-preserving` adds, then restores
    the length.  `where`: the last prompt token and all that is generated (every earlier token is then the
    same for all rows), all tokens, or generated tokens alone.  `others` are what the same trial changes at
    other layers, at the same tokens.
    """

    layer: int
    direction: Tensor
    amount: float
    mode: Mode = "add"
    where: Where = "last-and-generated"
    others: tuple[Steering, ...] = ()

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        if self.mode not in MODES:
            raise BadInput(f"mode {self.mode!r} is unknown", hint=f"use one of {', '.join(MODES)}")
        if self.where not in WHERE:
            raise BadInput(f"where {self.where!r} is unknown", hint=f"use one of {', '.join(WHERE)}")
        if self.direction.ndim != 1:
            raise BadInput(
                f"the direction has shape {tuple(self.direction.shape)}", hint="give one vector [D]"
            )
        if not math.isfinite(self.amount):
            raise BadInput(f"the amount is {self.amount}", hint="give a finite strength")
        if self.layer < 0:
            raise BadInput(f"layer {self.layer} is below 0", hint="layers count from 0")
        layers = [one.layer for one in self.parts]
        if len(set(layers)) < len(layers) or any(
            one.others or one.where != self.where for one in self.others
        ):
            raise BadInput(
                f"one trial steers the layers {layers}",
                hint="give each layer once, and the same `where` to all of them",
            )
        # The graph that made the direction must not stay alive for as long as it steers.
        object.__setattr__(self, "direction", self.direction.detach())

    @property
    def parts(self) -> tuple[Steering, ...]:
        """What is changed, layer by layer."""
        return (self, *self.others)

    @property
    def only_adds(self) -> bool:
        """Whether it adds the same vectors whatever the hidden states are."""
        return all(one.mode == "add" for one in self.parts)

    def added(self) -> Tensor:
        """Return what `add` adds, [D] in float32."""
        return self.direction.float() * self.amount

    def check_model(self, *, num_layers: int, width: int) -> None:
        """Raise BadInput unless the model has these layers and this width."""
        for one in self.parts:
            if one.layer >= num_layers:
                raise BadInput(
                    f"there is no layer {one.layer} to steer",
                    hint=f"the model has layers 0 to {num_layers - 1}",
                )
            if len(one.direction) != width:
                raise BadInput(
                    f"the vector is {len(one.direction)} wide and the model is {width} wide",
                    hint="use vectors that were fitted on this model",
                )


def turn(hidden: Tensor, *, unit: Tensor, vector: Tensor, amount: Tensor, mode: Turn) -> Tensor:
    """Steer hidden states [B, T, D] by what broadcasts: `unit` and `vector` [B, 1, D], `amount` [B, 1, 1]."""
    wide = hidden.float()
    if mode == "norm-preserving":
        moved = wide + vector
        size = moved.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        kept: Tensor = moved * (wide.norm(dim=-1, keepdim=True) / size)
        return kept.to(hidden.dtype)
    along = (wide * unit).sum(-1, keepdim=True)
    change = -amount * along if mode == "project-out" else amount - along
    return (wide + change * unit).to(hidden.dtype)


class TurnTable:
    """How entries turn the hidden states of one layer by one mode: rows of `num_entries`.

    `entries` are (number of an entry, what it does); every other entry leaves hidden states as they are.
    """

    def __init__(self, entries: Sequence[tuple[int, Steering]], num_entries: int, *, mode: Turn) -> None:
        self.mode: Turn = mode
        rows = [entry for entry, _ in entries]
        directions = torch.stack([one.direction.float().cpu() for _, one in entries])
        amounts = torch.tensor([one.amount for _, one in entries])
        unit, vector = torch.zeros(2, num_entries, directions.shape[1])
        amount, member = torch.zeros(num_entries, 1), torch.zeros(num_entries, dtype=torch.bool)
        unit[rows] = directions / directions.norm(dim=1, keepdim=True).clamp_min(TINY)
        vector[rows] = directions * amounts[:, None]
        amount[rows, 0], member[rows] = amounts, True
        self._tables = (unit, vector, amount, member)  # [entries, D] twice, [entries, 1], [entries]

    def steer(self, hidden: Tensor, *, entry: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Turn hidden states [B, T, D] by entries [B, T] or [B, 1]; `chosen` [B, T] leaves tokens alone."""
        if self._tables[0].device != hidden.device:  # once: later calls find everything in place
            unit, vector, amount, member = (table.to(hidden.device) for table in self._tables)
            self._tables = (unit, vector, amount, member)
        unit, vector, amount, member = (table[entry] for table in self._tables)
        moved = turn(hidden, unit=unit, vector=vector, amount=amount, mode=self.mode)
        kept = member if chosen is None else member & chosen
        # Chosen, not multiplied by 0: a token that is left alone keeps its bits.
        return torch.where(kept[..., None], moved, hidden)


class SteeringTables:
    """What each of `num_entries` entries adds at each of `layers`: `of_layer` are views [entries, D].

    Their addresses never change, so captured steps stay valid when an entry is rewritten.
    """

    def __init__(self, layers: Set[int], *, num_entries: int, decoder: Decoder) -> None:
        self._place = {layer: place for place, layer in enumerate(sorted(layers))}
        shape = (len(layers), num_entries, decoder.width)
        self._storage = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.of_layer = dict(zip(self._place, self._storage, strict=True))

    def write(self, steerings: Sequence[Steering]) -> None:
        """Let entry i add what steering i adds, and every later entry nothing.

        One copy to the device serves them all: hundreds take longer than a step of a small model.
        """
        self._storage.zero_()
        parts = [(entry, one) for entry, steering in enumerate(steerings) for one in steering.parts]
        adding = [(entry, one) for entry, one in parts if one.mode == "add"]
        if not adding:
            return
        directions = torch.stack([one.direction.to("cpu", torch.float32) for _, one in adding])
        added = directions * torch.tensor([one.amount for _, one in adding], dtype=torch.float32)[:, None]
        places = torch.tensor([(self._place[one.layer], entry) for entry, one in adding])
        layer, entry = places.T.to(self._storage.device)
        self._storage[layer, entry] = added.to(self._storage)

    def replace(self, entry: int, steering: Steering) -> None:
        """Give an entry to another steering."""
        self._storage[:, entry] = 0
        for one in steering.parts:
            self.of_layer[one.layer][entry] = one.added().to(self._storage)
