"""The end of a search: paired intervals, examples in the model's own words, and harm measured of the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.engines.steering.load_model import LoadedModel, load_model
from flatout.engines.steering.report.record import FEWEST, Trial, TrialRecord
from flatout.engines.steering.search import test_winner as winner_module
from flatout.engines.steering.search.run_search import split_of
from flatout.engines.steering.search.search_worker import SearchWorker
from flatout.engines.steering.search.test_winner import (
    check_harm,
    compare_pairs,
    compare_perplexities,
)
from flatout.engines.steering.settings import make_settings
from flatout.engines.steering.trials.steered_model import steered_model
from flatout.engines.steering.trials.steering import Steering
from flatout.engines.steering.vectors.fit_questions import fit_questions
from flatout.ground.errors import BadInput
from tests.support.steering import tiny_search, write_tiny

BEST = Trial(number=0, layer=2, method="pca", strength=1.2, where="last-and-generated")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> SearchWorker:
    folder = write_tiny(tmp_path_factory.mktemp("steering"))
    settings = make_settings(
        tiny_search(folder, folder / "run", max_new_tokens=5, examples=3, methods=["pca"])
    )
    loaded, split = load_model(folder / "model"), split_of(settings)
    vectors = fit_questions(settings, loaded, split.train, on_count=lambda done, total: None)
    return SearchWorker(
        settings, split, loaded, vectors, on_progress=lambda message: None, on_event=lambda event: None
    )


def generated(loaded: LoadedModel, text: str) -> str:
    model: Any = loaded.model
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    return str(loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_examples_are_what_transformers_would_have_said(worker: SearchWorker) -> None:
    examples = winner_module._show_winner(worker, BEST)
    held, loaded = worker.vectors["pca"], worker.loaded
    steering = Steering(layer=2, direction=held.direction(2), amount=1.2 * float(held.norms[2]))
    assert [example.prompt for example in examples] == [
        question.prompt for question in worker.split.fresh[:3]
    ]
    for example in examples:
        assert example.unsteered == generated(loaded, example.prompt)
        with steered_model(loaded.model, steering):
            assert example.steered == generated(loaded, example.prompt)
    assert any(example.steered != example.unsteered for example in examples)


def test_harm_is_measured_of_those_that_came_furthest(
    worker: SearchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    checked = check_harm(trials, worker.engine, worker.vectors, [(5, 6, 10, 20, 2), (3, 4, 7, 8)])
    ratios = [trial.perplexity_ratio for trial in checked]
    assert ratios[0] is None and ratios[3] is None
    assert ratios[1] == pytest.approx(1.0)
    assert ratios[2] is not None and ratios[2] > 1.05
    untouched = check_harm(trials, worker.engine, worker.vectors, [])
    assert list(untouched) == trials


def test_the_folder_of_the_example_is_small(worker: SearchWorker) -> None:
    folder = Path(worker.settings.model)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 300_000


def test_the_interval_is_that_of_the_paired_difference() -> None:
    drawn = np.random.default_rng(0)
    plain = drawn.uniform(0, 1, 60)
    steered = plain + 0.05 + drawn.normal(0, 0.01, 60)
    found = compare_pairs(list(steered), list(plain))
    assert found.num_questions == 60
    assert found.difference.value == pytest.approx(float((steered - plain).mean()))
    assert 0.04 < found.difference.low < found.difference.value < found.difference.high < 0.06
    # Unpaired, the questions' difficulty would hide it.
    assert found.steered.low < found.baseline.high
    assert found.is_certain


def test_no_effect_is_not_certain_and_a_seed_gives_the_same_interval() -> None:
    drawn = np.random.default_rng(1)
    plain, steered = drawn.uniform(0, 1, (2, 40)).tolist()
    found = compare_pairs(steered, plain, seed=5)
    assert not found.is_certain
    assert found == compare_pairs(steered, plain, seed=5)
    assert found != compare_pairs(steered, plain, seed=6)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    drawn = np.random.default_rng(2)
    covered = 0
    for _ in range(60):
        steered = drawn.normal(0.3, 1.0, 80)
        found = compare_pairs(steered.tolist(), [0.0] * 80)
        covered += found.difference.low <= 0.3 <= found.difference.high
    assert covered >= 51  # 57 expected; fewer than 51 has a chance below 1 %


@pytest.mark.parametrize("number", [1, 2, FEWEST - 1])
def test_too_few_questions_have_a_mean_and_no_interval(number: int) -> None:
    found = compare_pairs([0.5] * number, [0.25] * number)
    assert found.difference.value == 0.25
    assert found.difference.bounds is None and found.steered.bounds is None and not found.is_certain
    assert compare_perplexities([(-1.0, 2)] * number, [(-1.0, 2)] * number).bounds is None


def test_an_interval_of_the_fewest_values_holds_the_truth_nine_times_in_ten() -> None:
    drawn = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        found = compare_pairs(drawn.normal(0.3, 1.0, FEWEST).tolist(), [0.0] * FEWEST)
        assert found.difference.bounds is not None
        covered += found.difference.bounds[0] <= 0.3 <= found.difference.bounds[1]
    assert covered / 400 == pytest.approx(0.9, abs=0.04)


def test_values_must_come_in_pairs() -> None:
    with pytest.raises(BadInput, match="3 steered and 2 unsteered"):
        compare_pairs([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(BadInput, match="at least 1 question"):
        compare_pairs([], [])
    with pytest.raises(BadInput, match="not finite"):
        compare_pairs([1.0, math.nan], [1.0, 1.0])


def test_perplexity_is_counted_by_token() -> None:
    unsteered, steered = [(-6.0, 3), (-2.0, 1)], [(-9.0, 3), (-3.0, 1)]
    found = compare_perplexities(steered, unsteered)
    assert found.value == pytest.approx(math.e)
    many = compare_perplexities(steered * 5, unsteered * 5)
    assert many.low == pytest.approx(math.e) and many.high == pytest.approx(math.e)


def test_neutral_texts_need_tokens() -> None:
    with pytest.raises(BadInput, match="neutral texts"):
        compare_perplexities([], [])
    with pytest.raises(BadInput, match="neutral texts"):
        compare_perplexities([(0.0, 0)], [(0.0, 0)])
