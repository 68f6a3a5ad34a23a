"""From questions to vectors: one extraction, then every method over the same activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.engines.steering.extract.activations import Activations, extract
from flatout.engines.steering.extract.positions import read_position
from flatout.engines.steering.extract.store import ActivationStore
from flatout.engines.steering.extract.tiers import Tier
from flatout.engines.steering.load_model import LoadedModel
from flatout.engines.steering.questions import Question, write_prompts
from flatout.engines.steering.settings import SearchSettings, read_layers, read_tier
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors, fit, method_file
from flatout.ground import OnCount
from flatout.ground.units import read_bytes


def open_store(settings: SearchSettings) -> ActivationStore:
    """Open the store of a search, with the tiers and the limit that it names."""
    tiers = [
        Tier(device=found[0], budget_bytes=found[1]) for one in settings.tiers if (found := read_tier(one))
    ]
    limit = None if settings.store_limit is None else read_bytes(settings.store_limit)
    return ActivationStore(settings.store_folder, tiers=tiers, budget_bytes=limit)


def extract_questions(
    settings: SearchSettings,
    loaded: LoadedModel,
    questions: Sequence[Question],
    *,
    on_count: OnCount,
    store: ActivationStore | None = None,
) -> Activations:
    """Extract the activations of both answers of every question; what the store has is not computed."""
    return extract(
        loaded.model,
        loaded.tokenizer,
        write_prompts(questions, tokenizer=loaded.tokenizer),
        layers=read_layers(settings.layers),
        position=read_position(settings.position),
        store=store or open_store(settings),
        on_count=on_count,
    )


def fit_questions(
    settings: SearchSettings, loaded: LoadedModel, questions: Sequence[Question], *, on_count: OnCount
) -> dict[str, SteeringVectors]:
    """Fit the vectors of each method."""
    positive, negative = extract_questions(settings, loaded, questions, on_count=on_count).halves()
    return {name: fit(positive, negative, method=name, seed=settings.seed) for name in settings.methods}


def save_vectors(vectors: Mapping[str, SteeringVectors], folder: Path) -> None:
    """Write each method's vectors as `folder`/METHOD.safetensors."""
    for name, made in vectors.items():
        made.save(method_file(folder, name))
