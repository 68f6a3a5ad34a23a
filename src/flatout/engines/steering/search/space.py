"""What a search chooses from: layer, method, strength and where.

Strength is in units of the layer's mean residual norm, so that 0.1 means the same at every layer and one
range serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flatout.engines.steering.trials.steering import WHERE, Steering, Where
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One configuration; `number` is Optuna's."""

    number: int
    layer: int
    method: str
    strength: float
    where: Where


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Every combination of these; `strength` is (lowest, highest)."""

    layers: tuple[int, ...]
    methods: tuple[str, ...]
    strength: tuple[float, float] = (0.0, 0.5)
    where: tuple[Where, ...] = ("last-and-generated",)

    def __post_init__(self) -> None:
        """Collect every error before raising."""
        wrong = [
            f"{name} is empty or names something twice"
            for name, values in (("layers", self.layers), ("methods", self.methods), ("where", self.where))
            if not values or len(set(values)) != len(values)
        ]
        wrong += [f"where {one!r} is not one of {', '.join(WHERE)}" for one in self.where if one not in WHERE]
        low, high = self.strength
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            wrong.append(f"strength from {low} to {high} is not a range")
        if wrong:
            raise BadInput(
                "; ".join(wrong), hint="give at least one of each, and a lowest and highest strength"
            )

    @classmethod
    def of(
        cls,
        vectors: Mapping[str, SteeringVectors],
        *,
        layers: Sequence[int] | None = None,
        strength: tuple[float, float] = (0.0, 0.5),
        where: Sequence[Where] = ("last-and-generated",),
    ) -> Space:
        """Take all that `vectors` (by method) offer, or some of their layers."""
        if not vectors:
            raise BadInput("no vectors to search over", hint="fit at least one method")
        common = set.intersection(*(set(one.layers) for one in vectors.values()))
        chosen = sorted(common) if layers is None else sorted(layers)
        absent = [layer for layer in chosen if layer not in common]
        if absent or not chosen:
            raise BadInput(
                f"no vectors for the layers {absent or 'asked for'} in every method",
                hint=f"they share {sorted(common)}",
            )
        return cls(
            layers=tuple(chosen), methods=tuple(sorted(vectors)), strength=strength, where=tuple(where)
        )

    def suggest(self, trial: Any) -> Trial:
        """Let an Optuna trial choose."""
        return Trial(
            number=trial.number,
            layer=self._layer(trial),
            method=trial.suggest_categorical("method", list(self.methods)),
            strength=trial.suggest_float("strength", *self.strength),
            where=trial.suggest_categorical("where", list(self.where)),
        )

    def _layer(self, trial: Any) -> int:
        """Suggest a number where layers are evenly spaced: a sampler then knows that neighbours are alike."""
        ordered = sorted(self.layers)
        steps = {after - before for before, after in pairwise(ordered)}
        if len(steps) > 1:
            return int(trial.suggest_categorical("layer", ordered))
        return int(trial.suggest_int("layer", ordered[0], ordered[-1], step=next(iter(steps), 1)))


def read_trial(number: int, params: Mapping[str, Any]) -> Trial | None:
    """Read a stored trial's configuration; None if it was killed before all of it was chosen."""
    if not {"layer", "method", "strength", "where"} <= params.keys():
        return None
    return Trial(
        number=number,
        layer=int(params["layer"]),
        method=str(params["method"]),
        strength=float(params["strength"]),
        where=params["where"],
    )


def steering_of(trial: Trial, vectors: Mapping[str, SteeringVectors]) -> Steering:
    """Make what a trial adds: strength times the layer's mean norm, along the method's direction."""
    if trial.method not in vectors:
        raise BadInput(
            f"trial {trial.number} takes the method {trial.method!r}", hint=f"there are {', '.join(vectors)}"
        )
    held = vectors[trial.method]
    return Steering(
        layer=trial.layer,
        direction=held.direction(trial.layer),
        amount=trial.strength * held.norm(trial.layer),
        where=trial.where,
    )
