"""The end of a search: examples are the model's own words, and harm is measured of the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engines.steering.loading import Opened, open_model
from flatout.engines.steering.report.record import TrialRecord
from flatout.engines.steering.search import test_winner as winner_module
from flatout.engines.steering.search.run_search import Split, engine_of, split_of
from flatout.engines.steering.search.space import Trial
from flatout.engines.steering.search.test_winner import _with_side_effects, continued
from flatout.engines.steering.settings import SearchSettings, make_settings
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.vectors.fit_questions import fit_methods
from flatout.engines.steering.vectors.steering_vectors import SteeringVectors
from tests.support.steering import tiny_search, write_tiny

Setting = tuple[SearchSettings, Split, Opened, dict[str, SteeringVectors]]
BEST = Trial(number=0, layer=2, method="pca", strength=1.2, where="last-and-generated")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = write_tiny(tmp_path_factory.mktemp("steering"))
    settings = make_settings(tiny_search(folder, folder / "run", max_new_tokens=5, examples=3))
    opened, split = open_model(folder / "model", device="cpu"), split_of(settings)
    vectors = fit_methods(
        opened,
        split.train,
        methods=["pca"],
        layers="all",
        position="last",
        store=None,
        seed=0,
    )
    return settings, split, opened, vectors


def generated(opened: Opened, text: str) -> str:
    model: Any = opened.model
    ids = torch.tensor([opened.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    return str(opened.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_examples_are_what_transformers_would_have_said(setting: Setting) -> None:
    settings, split, opened, vectors = setting
    engine = engine_of(settings, split, opened)
    examples = continued(settings, split, opened, vectors, engine=engine, best=BEST)
    held = vectors["pca"]
    steering = Steering(layer=2, direction=held.direction(2), amount=1.2 * float(held.norms[2]))
    assert [example.prompt for example in examples] == [question.text for question in split.fresh[:3]]
    for example in examples:
        assert example.unsteered == generated(opened, example.prompt)
        with steered_model(opened.model, steering):
            assert example.steered == generated(opened, example.prompt)
    assert any(example.steered != example.unsteered for example in examples)


def test_harm_is_measured_of_those_that_came_furthest(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, split, opened, vectors = setting
    monkeypatch.setattr(winner_module, "MOST_CHECKED", 2)

    def record(number: int, *, score: float | None, num_questions: int, strength: float) -> TrialRecord:
        return TrialRecord(
            number=number,
            layer=1,
            method="pca",
            strength=strength,
            where="all",
            state="complete",
            score=score,
            num_questions=num_questions,
        )

    trials = [
        record(0, score=0.9, num_questions=2, strength=0.1),
        record(1, score=0.8, num_questions=20, strength=0.0),
        record(2, score=0.7, num_questions=20, strength=3.0),
        record(3, score=None, num_questions=20, strength=1.0),
    ]
    engine = engine_of(settings, split, opened)
    checked = _with_side_effects(trials, engine, vectors, [(5, 6, 10, 20, 2), (3, 4, 7, 8)])
    ratios = [trial.perplexity_ratio for trial in checked]
    assert ratios[0] is None and ratios[3] is None
    assert ratios[1] == pytest.approx(1.0)
    assert ratios[2] is not None and ratios[2] > 1.05
    untouched = _with_side_effects(trials, engine, vectors, [(5,)])
    assert list(untouched) == trials


def test_the_folder_of_the_example_is_small(setting: Setting) -> None:
    folder = Path(setting[0].model)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 300_000
