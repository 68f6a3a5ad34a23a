"""What one trial does to the residual stream, and the tables that do it for many trials at once.

A layer's output h [D] is changed along a direction u: added to, cleared of it (`project-out`), set to a given
component (`clamp`), or turned towards it at its own length (`norm-preserving`).  Only `add` is the same
vector whatever h is, so only `add` can share a batch through a table of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.multiplex.models.decoder import Decoder

Turn = Literal["project-out", "clamp", "norm-preserving"]  # what depends on the hidden state
Mode = Literal["add"] | Turn
Where = Literal["last-and-generated", "all", "generated"]
MODES: tuple[Mode, ...] = ("add", "project-out", "clamp", "norm-preserving")
WHERE: tuple[Where, ...] = ("last-and-generated", "all", "generated")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steering:
    """A change of what layer `layer` (from 0) gives, along `direction` [D].

    `amount` is absolute.  `add`: so many times the direction is added.  `project-out`: this share of the
    component along it is removed, 1 for all.  `clamp`: the component becomes this.  `norm-preserving`: as
    `add`, and the length is put back.  `where`: the last prompt token and all that is generated (every
    earlier token is then the same for all rows), all tokens, or generated tokens alone.
    """

    layer: int
    direction: Tensor
    amount: float
    mode: Mode = "add"
    where: Where = "last-and-generated"

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        if self.mode not in MODES:
            raise BadInput(f"mode {self.mode!r} is unknown", hint=f"take one of {', '.join(MODES)}")
        if self.where not in WHERE:
            raise BadInput(f"where {self.where!r} is unknown", hint=f"take one of {', '.join(WHERE)}")
        if self.direction.ndim != 1:
            raise BadInput(
                f"the direction has shape {tuple(self.direction.shape)}", hint="give one vector [D]"
            )
        if not math.isfinite(self.amount):
            raise BadInput(f"the amount is {self.amount}", hint="give a finite strength")
        if self.layer < 0:
            raise BadInput(f"layer {self.layer} is below 0", hint="layers count from 0")
        # The graph that made the direction must not stay alive for as long as it steers.
        object.__setattr__(self, "direction", self.direction.detach())

    def added(self) -> Tensor:
        """What `add` adds, [D] in float32."""
        return self.direction.float() * self.amount

    def check_model(self, *, num_layers: int, width: int) -> None:
        """Raise BadInput unless the model has this layer and this width."""
        if self.layer >= num_layers:
            raise BadInput(
                f"steering at layer {self.layer}", hint=f"the model has layers 0 to {num_layers - 1}"
            )
        if len(self.direction) != width:
            raise BadInput(
                f"the vector is {len(self.direction)} wide and the model is {width} wide",
                hint="take vectors that were fitted on this model",
            )

    def check_packable(self, decoder: Decoder) -> None:
        """Raise BadInput unless this can share a batch of `decoder` with other steerings."""
        if self.mode != "add":
            raise BadInput(
                f"mode {self.mode!r} cannot share a batch",
                hint="pack mode 'add'; steered_model runs them all",
            )
        self.check_model(num_layers=len(decoder.blocks), width=decoder.width)


def turn(hidden: Tensor, *, unit: Tensor, vector: Tensor, amount: Tensor, mode: Turn) -> Tensor:
    """Steer hidden states [B, T, D] everywhere: `unit` and `vector` [B, 1, D], `amount` [B, 1, 1]."""
    wide = hidden.float()
    if mode == "norm-preserving":
        moved = wide + vector
        size = moved.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        kept: Tensor = moved * (wide.norm(dim=-1, keepdim=True) / size)
        return kept.to(hidden.dtype)
    along = (wide * unit).sum(-1, keepdim=True)
    change = -amount * along if mode == "project-out" else amount - along
    return (wide + change * unit).to(hidden.dtype)


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
        if not steerings:
            return
        directions = torch.stack([one.direction.to("cpu", torch.float32) for one in steerings])
        added = directions * torch.tensor([one.amount for one in steerings], dtype=torch.float32)[:, None]
        places = torch.tensor([[self._place[one.layer] for one in steerings], range(len(steerings))])
        layer, entry = places.to(self._storage.device)
        self._storage[layer, entry] = added.to(self._storage)

    def replace(self, entry: int, steering: Steering) -> None:
        """Give an entry to another steering."""
        self._storage[:, entry] = 0
        self.of_layer[steering.layer][entry] = steering.added().to(self._storage)
