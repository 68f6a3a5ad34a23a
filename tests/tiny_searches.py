"""Words, questions and vectors for searches over a tiny random model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from flatout.engines.steering.questions import Question, question_of
from flatout.engines.steering.search.study import SearchStudy, open_study
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from tests.tiny_models import VOCABULARY, prompts_of, tiny_model

WIDTH, LAYERS, PLANTED = 48, 4, 2
YES, NO = 10, 11


@functools.cache
def tokenizer() -> Any:
    """A real tokenizer of as many words as the tiny models know: w0, w1, ..."""
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


@functools.cache
def model() -> Any:
    """Four layers with random weights."""
    return tiny_model(num_hidden_layers=LAYERS).requires_grad_(False)


def words(tokens: tuple[int, ...]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def questions(number: int, *, seed: int = 1) -> list[Question]:
    """Prompts of different lengths whose answers are always the same two words."""
    lengths = [4 + index % 5 for index in range(number)]
    return [
        question_of(words(prompt), positive=f"w{YES}", negative=f"w{NO}")
        for prompt in prompts_of(lengths, seed=seed)
    ]


@functools.cache
def vectors() -> dict[str, SteeringVectors]:
    """Random directions, and one that raises YES over NO: method "planted" at layer `PLANTED`."""
    generator = torch.Generator().manual_seed(3)
    directions = {name: torch.randn(LAYERS, WIDTH, generator=generator) for name in ("planted", "random")}
    head = model().get_output_embeddings().weight
    directions["planted"][PLANTED] = (head[YES] - head[NO]).float()
    with torch.no_grad():
        ids = torch.tensor([prompts_of([12])[0]])
        states = model()(ids, output_hidden_states=True).hidden_states[1:]
    norms = torch.stack([state.norm(dim=-1).mean() for state in states])
    return {
        name: SteeringVectors(
            values=values / values.norm(dim=1, keepdim=True),
            norms=norms,
            layers=tuple(range(LAYERS)),
            method=name,
        )
        for name, values in directions.items()
    }


def study_in(folder: Path, **changes: Any) -> SearchStudy:
    """A study in a journal file of a folder."""
    return open_study(folder / "study.journal", **changes)
