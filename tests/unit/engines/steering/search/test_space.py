from __future__ import annotations

from typing import Any

import pytest
import torch

from flatout.engines.steering.report.record import Trial
from flatout.engines.steering.search.space import Space, make_steering, read_trial, steering_of
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from flatout.ground.errors import BadInput


def vectors(method: str, layers: tuple[int, ...] = (0, 1, 2)) -> SteeringVectors:
    values = torch.eye(4)[: len(layers)]
    return SteeringVectors(values=values, norms=torch.arange(len(layers)) + 2.0, layers=layers, method=method)


class Recorded:
    """What a space asks of a trial; it answers with the highest."""

    number = 3

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def suggest_int(self, name: str, low: int, high: int, *, step: int) -> int:
        self.asked[name] = (low, high, step)
        return high

    def suggest_float(self, name: str, low: float, high: float) -> float:
        self.asked[name] = (low, high)
        return high

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        self.asked[name] = choices
        return choices[-1]


def test_a_space_offers_what_all_methods_have() -> None:
    space = Space.of({"pca": vectors("pca", (1, 2)), "lda": vectors("lda")})
    assert (space.layers, space.methods) == ((1, 2), ("lda", "pca"))
    assert Space.of({"lda": vectors("lda")}, layers=[2, 0]).layers == (0, 2)
    with pytest.raises(BadInput, match=r"layers \[0\].*they share \[1, 2\]"):
        Space.of({"pca": vectors("pca", (1, 2)), "lda": vectors("lda")}, layers=[0, 1])
    with pytest.raises(BadInput, match="no vectors"):
        Space.of({})
    with pytest.raises(BadInput, match="asked for"):
        Space.of({"pca": vectors("pca", (1,)), "lda": vectors("lda", (0,))})


def test_evenly_spaced_layers_are_a_number() -> None:
    for layers, expected in (((0, 2, 4), (0, 4, 2)), ((3,), (3, 3, 1)), ((0, 1, 4), [0, 1, 4])):
        trial = Recorded()
        made = Space(layers=layers, methods=("lda",), strength=(-1.0, 1.0)).suggest(trial)
        assert trial.asked["layer"] == expected
        assert made == Trial(
            number=3, layer=layers[-1], method="lda", strength=1.0, where="last-and-generated"
        )
        chosen = {"layer": made.layer, "method": "lda", "strength": 1.0, "where": made.where}
        assert read_trial(3, {**chosen, "mode": "add", "span": 1}) == made
        assert read_trial(3, chosen) is None  # killed before its mode was chosen


def test_modes_and_numbers_of_layers_are_chosen_too() -> None:
    trial = Recorded()
    held = {"lda": vectors("lda")}
    made = Space.of(held, strength=(0.0, 0.5), modes=["add", "clamp"], spans=[1, 2]).suggest(trial)
    assert (trial.asked["mode"], trial.asked["span"]) == (["add", "clamp"], [1, 2])
    assert (made.mode, made.span) == ("clamp", 2)
    with pytest.raises(BadInput, match=r"mode 'x' is not one of add.*a span of 4 is not 1 to 3 layers"):
        Space.of(held, modes=["x"], spans=[4])  # type: ignore[list-item]


def test_a_grid_has_every_choice_and_evenly_spaced_strengths() -> None:
    grid = Space(layers=(4, 2), methods=("lda",), strength=(-1.0, 1.0), spans=(1, 2)).grid(strengths=5)
    assert (grid["layer"], grid["strength"], grid["span"]) == ([2, 4], [-1.0, -0.5, 0.0, 0.5, 1.0], [1, 2])


def test_a_trial_that_was_never_chosen_is_none() -> None:
    assert read_trial(0, {"layer": 1, "method": "lda"}) is None


def test_every_error_of_a_space_is_named() -> None:
    with pytest.raises(BadInput, match=r"layers is empty.*methods.*where 'x'.*strength from 1\.0 to 1\.0"):
        Space(layers=(), methods=("a", "a"), where=("x",), strength=(1.0, 1.0))  # type: ignore[arg-type]


def test_strength_counts_in_mean_norms() -> None:
    trial = Trial(number=0, layer=2, method="lda", strength=0.5, where="all")
    made = steering_of(trial, {"lda": vectors("lda")})
    assert (made.layer, made.amount, made.where, made.mode) == (2, 2.0, "all", "add")
    assert made.added().tolist() == [0, 0, 2, 0]
    with pytest.raises(BadInput, match="method 'lda'"):
        steering_of(trial, {"pca": vectors("pca")})
    with pytest.raises(BadInput, match="layer 2"):
        steering_of(trial, {"lda": vectors("lda", (0, 1))})


@pytest.mark.parametrize(
    ("mode", "span", "amounts"),
    [
        ("add", 1, [1.5]),
        ("add", 2, [0.75, 1.0]),  # what is added is shared among the layers
        ("norm-preserving", 2, [0.75, 1.0]),
        ("clamp", 2, [1.5, 2.0]),  # a component is a component, wherever it is set
        ("project-out", 2, [0.5, 0.5]),  # a share of what is there
        ("add", 3, [0.75, 1.0]),  # the model has no third layer after it
    ],
)
def test_what_strength_means_in_each_mode(mode: Any, span: int, amounts: list[float]) -> None:
    made = make_steering(vectors("lda"), layer=1, strength=0.5, where="all", mode=mode, span=span)
    assert [one.amount for one in made.parts] == amounts
    assert [one.layer for one in made.parts] == [1, 2][: len(amounts)]
    assert {(one.mode, one.where) for one in made.parts} == {(mode, "all")}
