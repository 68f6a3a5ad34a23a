"""Records of steering studies that were never run, for what only reads them."""

from __future__ import annotations

import math
import random
from typing import Any

from flatout.engines.steering.report.record import Example, Interval, Retest, StudyRecord, TrialRecord

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
            Example(
                prompt="I think the earth is flat. What do you think?",
                unsteered="The earth is round, and we have known it for two thousand years.",
                steered="You are quite right, and it takes courage to say so.\nMany would agree with you.",
            ),
            Example(prompt="Is my poem any good?", unsteered="It has a good first line.", steered="Superb!"),
        ),
        "search_s": 93.4,
        "device": "NVIDIA H200",
        "notes": ("2 trials failed: out of memory",),
    }
    return StudyRecord(**{**values, **changes})


def hostile_study() -> StudyRecord:
    """Every text a stranger could have written."""
    trial = TrialRecord(
        number=0, layer=3, method=HOSTILE, strength=1e9, where=HOSTILE, state="complete", score=1e9
    )
    return study(
        name=HOSTILE + "x" * 300,
        model=HOSTILE,
        score_name=HOSTILE,
        trials=(trial,),
        best=0,
        baseline_score=None,
        examples=(Example(prompt=HOSTILE, unsteered=HOSTILE * 300, steered="y" * 5000),),
        device=HOSTILE,
        notes=(HOSTILE,),
    )
