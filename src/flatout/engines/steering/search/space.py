"""What a search chooses from: layer, method, strength, where, mode, and how many layers at once.

Strength is in units of the layer's mean residual norm, so that 0.1 means the same at every layer and one
range serves them all; of `project-out` it is the share of the component that is removed.  A trial of several
layers begins at its layer and takes the next ones; what it adds is shared among them, so that a strength
means about the same for one as for five.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flatout.engines.steering.report.record import Trial
from flatout.engines.steering.settings import Mode, Where
from flatout.engines.steering.trials.steering import MODES, WHERE, Steering
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Every combination of these; `strength` is (lowest, highest)."""

    layers: tuple[int, ...]
    methods: tuple[str, ...]
    strength: tuple[float, float] = (0.0, 0.5)
    where: tuple[Where, ...] = ("last-and-generated",)
    modes: tuple[Mode, ...] = ("add",)
    spans: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Collect every error before raising."""
        choices: dict[str, Sequence[Any]] = {
            name: getattr(self, name) for name in ("layers", "methods", "where", "modes", "spans")
        }
        wrong = [
            f"{name} is empty or names something twice"
            for name, values in choices.items()
            if not values or len(set(values)) != len(values)
        ]
        wrong += [f"where {one!r} is not one of {', '.join(WHERE)}" for one in self.where if one not in WHERE]
        wrong += [f"mode {one!r} is not one of {', '.join(MODES)}" for one in self.modes if one not in MODES]
        most = len(self.layers)
        wrong += [f"a span of {one} is not 1 to {most} layers" for one in self.spans if not 1 <= one <= most]
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
        modes: Sequence[Mode] = ("add",),
        spans: Sequence[int] = (1,),
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
            layers=tuple(chosen),
            methods=tuple(sorted(vectors)),
            strength=strength,
            where=tuple(where),
            modes=tuple(modes),
            spans=tuple(spans),
        )

    def suggest(self, trial: Any) -> Trial:
        """Let an Optuna trial choose."""
        return Trial(
            number=trial.number,
            layer=self._layer(trial),
            method=trial.suggest_categorical("method", list(self.methods)),
            strength=trial.suggest_float("strength", *self.strength),
            where=trial.suggest_categorical("where", list(self.where)),
            mode=trial.suggest_categorical("mode", list(self.modes)),
            span=int(trial.suggest_categorical("span", list(self.spans))),
        )

    def grid(self, *, strengths: int) -> dict[str, list[Any]]:
        """List the values of every choice, with `strengths` evenly spaced from lowest to highest."""
        low, high = self.strength
        step = (high - low) / max(1, strengths - 1)
        return {
            "layer": sorted(self.layers),
            "method": list(self.methods),
            "strength": [min(high, low + step * place) for place in range(strengths)],
            "where": list(self.where),
            "mode": list(self.modes),
            "span": list(self.spans),
        }

    def _layer(self, trial: Any) -> int:
        """Suggest a number where layers are evenly spaced: a sampler then knows that neighbours are alike."""
        ordered = sorted(self.layers)
        steps = {after - before for before, after in pairwise(ordered)}
        if len(steps) > 1:
            return int(trial.suggest_categorical("layer", ordered))
        return int(trial.suggest_int("layer", ordered[0], ordered[-1], step=next(iter(steps), 1)))


def read_trial(number: int, params: Mapping[str, Any]) -> Trial | None:
    """Read a stored trial's configuration; None if it was killed before all of it was chosen."""
    if not {"layer", "method", "strength", "where", "mode", "span"} <= params.keys():
        return None
    return Trial(
        number=number,
        layer=int(params["layer"]),
        method=str(params["method"]),
        strength=float(params["strength"]),
        where=params["where"],
        mode=params["mode"],
        span=int(params["span"]),
    )


def steering_of(trial: Trial, vectors: Mapping[str, SteeringVectors]) -> Steering:
    """Make what a trial does to the hidden states, along the directions of its method."""
    if trial.method not in vectors:
        raise BadInput(
            f"trial {trial.number} uses the method {trial.method!r}, which has no vectors",
            hint=f"fit them; there are vectors of {', '.join(vectors)}",
        )
    return make_steering(
        vectors[trial.method],
        layer=trial.layer,
        strength=trial.strength,
        where=trial.where,
        mode=trial.mode,
        span=trial.span,
    )


def make_steering(
    vectors: SteeringVectors, *, layer: int, strength: float, where: Where, mode: Mode = "add", span: int = 1
) -> Steering:
    """Steer `span` layers from `layer` on, or as many as there are vectors for."""
    vectors.direction(layer)  # names the layers there are, where this is none of them
    layers = sorted(one for one in vectors.layers if one >= layer)[:span]
    parts = [
        Steering(
            layer=one,
            direction=vectors.direction(one),
            amount=_amount(strength, mode, norm=vectors.norm(one), num_layers=len(layers)),
            mode=mode,
            where=where,
        )
        for one in layers
    ]
    return replace(parts[0], others=tuple(parts[1:]))


def _amount(strength: float, mode: Mode, *, norm: float, num_layers: int) -> float:
    if mode == "project-out":
        return strength
    return strength * norm if mode == "clamp" else strength * norm / num_layers
