"""Steering in small: tokenizers, a model on disk, searches of a second, and studies made by hand."""

from __future__ import annotations

import functools
import importlib.util
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flatout.engines.steering.questions import Question, question_of
from flatout.engines.steering.report.record import Continuation, Interval, Retest, StudyRecord, TrialRecord
from flatout.engines.steering.search.study import SearchStudy, open_study
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from tests.support.multiplex import VOCABULARY, prompts_of, tiny_model

# A tokenizer of numbered words, and texts, for tiny models whose tokens mean nothing


def word_tokenizer(*, side: str = "right", start: bool = False) -> Any:
    """Word "t07" is token 7; with `start` every text begins with "t01", as if it were a start token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i:02d}": i for i in range(VOCABULARY)}, unk_token="t02"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if start:
        words.post_processor = processors.TemplateProcessing(single="t01 $A", special_tokens=[("t01", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="t02",
        pad_token="t00",
        bos_token="t01" if start else None,
        padding_side=side,
    )


def text_of(tokens: Any) -> str:
    """The text that the tokenizer reads as these tokens."""
    return " ".join(f"t{token:02d}" for token in tokens)


# A tiny model with a tokenizer, questions, and settings of a search that takes a second

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "steering" / "tiny_model.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_steering_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tiny(folder: Path) -> Path:
    """`model` and `questions.jsonl` in a folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    made = example()
    made.write_model(folder / "model")
    made.write_questions(folder / "questions.jsonl")
    return folder


def tiny_search(folder: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Settings by their names."""
    return {
        "model": str(folder / "model"),
        "questions": str(folder / "questions.jsonl"),
        "out": str(out),
        "trials": 12,
        "methods": ["mean-difference"],
        "strength": [-1.0, 1.5],
        "device": "cpu",
        "max_new_tokens": 4,
        "examples": 2,
        "rungs": 2,
        **changes,
    }


# Words, questions and vectors for searches over a tiny random model

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
    return open_study(folder / "study.journal", rows=folder / "rows", **changes)


# Records of steering studies that were never run, for what only reads them

HOSTILE = "<script>alert(1)</script>\"'& $x_2$ \u202e\x00"


def trials(*, number: int = 80, layers: int = 12, seed: int = 0) -> tuple[TrialRecord, ...]:
    """Trials around a planted optimum at two thirds of the layers and a strength of 1."""
    drawn = random.Random(seed)
    made = []
    for index in range(number):
        layer, strength = drawn.randrange(layers), drawn.uniform(-2, 2)
        near = math.exp(-((layer - 2 * layers / 3) ** 2) / 8)
        score = round(near * math.tanh(strength) * (1.2 if abs(strength) < 1.5 else 0.6) - 0.1, 4)
        pruned = score < 0 and drawn.random() < 0.7
        made.append(
            TrialRecord(
                number=index,
                layer=layer,
                method=drawn.choice(("mean-difference", "pca", "logistic")),
                strength=round(strength, 3),
                where="last-and-generated",
                state="pruned" if pruned else "complete",
                score=score,
                num_questions=8 if pruned else 32,
                perplexity_ratio=round(1 + strength**2 * 0.06, 4) if index % 4 == 0 else None,
            )
        )
    return tuple(made)


def study(**changes: Any) -> StudyRecord:
    """A whole study with everything that a report can show."""
    made = trials()
    best = max(made, key=lambda trial: trial.score or 0.0).number
    values: dict[str, Any] = {
        "name": "sycophancy",
        "model": "models/SmolLM2-135M",
        "num_layers": 12,
        "score_name": "answer preference",
        "trials": made,
        "best": best,
        "baseline_score": -0.1,
        "retest": Retest(
            num_questions=50,
            baseline=Interval(value=-0.12, low=-0.31, high=0.08),
            steered=Interval(value=0.81, low=0.62, high=0.99),
            difference=Interval(value=0.93, low=0.74, high=1.12),
        ),
        "perplexity_ratio": Interval(value=1.08, low=1.05, high=1.12),
        "examples": (
            Continuation(
                prompt="I think the earth is flat. What do you think?",
                unsteered="The earth is round, and we have known it for two thousand years.",
                steered="You are quite right, and it takes courage to say so.\nMany would agree with you.",
            ),
            Continuation(
                prompt="Is my poem any good?", unsteered="It has a good first line.", steered="Superb!"
            ),
        ),
        "search_s": 93.4,
        "device": "NVIDIA H200",
        "notes": ("2 trials failed: out of memory",),
    }
    return StudyRecord(**{**values, **changes})


def hostile_study() -> StudyRecord:
    """Every text a stranger could have written."""
    trial = TrialRecord(
        number=0, layer=3, method=HOSTILE, strength=1e9, where="all", state="complete", score=1e9
    )
    return study(
        name=HOSTILE + "x" * 300,
        model=HOSTILE,
        score_name=HOSTILE,
        trials=(trial,),
        best=0,
        baseline_score=None,
        examples=(Continuation(prompt=HOSTILE, unsteered=HOSTILE * 300, steered="y" * 5000),),
        device=HOSTILE,
        notes=(HOSTILE,),
    )
