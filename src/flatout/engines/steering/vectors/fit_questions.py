"""From questions to vectors: one extraction, then every method over the same activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.engines.steering.loading import Opened
from flatout.engines.steering.questions import Question, pairs_of
from flatout.errors import BadInput

if TYPE_CHECKING:
    from flatout.engines.steering.extract.activations import Activations
    from flatout.engines.steering.vectors.steering_vectors import SteeringVectors

Layers = list[int] | Literal["all"]
OnProgress = Callable[[int, int], None]


def known_methods() -> tuple[str, ...]:
    """Every way to fit a direction."""
    from flatout.engines.steering.vectors.methods import METHODS

    return (*METHODS, "random")


def check_methods(methods: Sequence[str]) -> None:
    """Refuse a method that is not there before the model is opened."""
    wrong = [name for name in methods if name not in known_methods()]
    if wrong:
        raise BadInput(f"no method {wrong[0]!r}", hint=f"take some of {', '.join(known_methods())}")


def extract_questions(
    opened: Opened,
    questions: Sequence[Question],
    *,
    layers: Layers,
    position: str,
    store: Path | None,
    on_progress: OnProgress = lambda done, total: None,
) -> Activations:
    """Activations of both answers of every question; what the store has is not computed."""
    from flatout.engines.steering.extract.activations import extract
    from flatout.engines.steering.extract.positions import read_position
    from flatout.engines.steering.extract.store import ActivationStore

    return extract(
        opened.model,
        opened.tokenizer,
        pairs_of(questions, tokenizer=opened.tokenizer),
        layers=layers,
        position=read_position(position),
        store=None if store is None else ActivationStore(store),
        on_progress=on_progress,
    )


def fit_methods(
    opened: Opened,
    questions: Sequence[Question],
    *,
    methods: Sequence[str],
    layers: Layers,
    position: str,
    store: Path | None,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> dict[str, SteeringVectors]:
    """Vectors of each method."""
    from flatout.engines.steering.vectors.steering_vectors import fit

    check_methods(methods)
    found = extract_questions(
        opened, questions, layers=layers, position=position, store=store, on_progress=on_progress
    )
    positive, negative = found.halves()
    made = {}
    for name in methods:
        method: Any = name  # one of the known ones
        made[name] = fit(positive, negative, method=method, seed=seed)
    return made


def save_vectors(made: Mapping[str, SteeringVectors], folder: Path) -> None:
    """Write each method's vectors as `folder`/METHOD.safetensors."""
    for name, vectors in made.items():
        vectors.save(folder / f"{name}.safetensors")
