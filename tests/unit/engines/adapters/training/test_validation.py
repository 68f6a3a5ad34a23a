"""Judging is what running the rows one by one gives, leaves every mode alone, and can mix adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout.engines.adapters.training.validation import HeldOutScores, Validation, judge_shared
from flatout.ground.codec import encode
from tests.support.adapters import opened, save_tiny


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("validation")
    with opened(save_tiny(folder / "tiny"), folder / "run", evaluation={"tokens": 300}) as made:
        torch.manual_seed(0)
        for number, spec in enumerate(made.bank.specs):  # rows beyond an adapter's rank stay zero
            rows = made.bank.factors[number, : spec.rank]
            rows.add_(0.2 * torch.randn_like(rows))
        yield made


@pytest.mark.parametrize("name", ["sentiment", "translation"])
def test_batches_are_judged_as_single_rows(assembly: Any, name: str) -> None:
    assembly.train()
    validation = Validation(assembly, rows=6)
    found = validation.judge(name)
    part, rows = assembly.parts[name], validation.rows[name]
    losses, counts, said = [], [], []
    assembly.train(False)
    with torch.no_grad():
        for example in rows.examples:
            batch = part.task.collate([example], adapter=part.adapter, pad_id=assembly.pad_id)
            (states,) = assembly.encoder((batch.block,))
            losses.append(float(part.task.loss(part.head, states, batch)) * float(batch.count))
            counts.append(float(batch.count))
            said += part.task.predict(
                part.head, states, batch, tokenizer=assembly.tokenizer, records=rows.records, write=False
            )
    assert found.loss == pytest.approx(sum(losses) / sum(counts), rel=1e-4)
    assert found.scores[part.task.metric] == part.task.score(said, rows.records)[part.task.metric]


def test_dropout_goes_on_as_it_was(assembly: Any) -> None:
    assembly.train()
    Validation(assembly, rows=2).judge("translation")
    assert all(module.training for module in assembly.modules().values())


def test_weights_choose_the_adapters(assembly: Any) -> None:
    validation = Validation(assembly, rows=4)
    own = torch.tensor([[1.0, 0.0]]).repeat(4, 1)
    assert validation.judge("sentiment", weights_NT=own).loss == pytest.approx(
        validation.judge("sentiment").loss, rel=1e-4
    )
    foreign = validation.judge("sentiment", weights_NT=own.flip(1))
    assert foreign.loss != pytest.approx(validation.judge("sentiment").loss, rel=1e-4)


def test_every_task_is_judged_on_one_rank_and_known_to_all() -> None:
    scores = {name: HeldOutScores(scores={name: 1 / 3}, loss=float("nan")) for name in "abc"}
    said = [json.dumps(encode({name: scores[name] for name in names})) for names in ("ac", "b")]
    for rank, own in enumerate(("ac", "b")):
        ranks: Any = SimpleNamespace(rank=rank, num_ranks=2, texts=lambda text: said)
        found = judge_shared("abc", {name: scores[name] for name in own}.__getitem__, ranks=ranks)
        assert list(found) == list("abc")
        ranks.texts = None  # nothing is due: nobody is asked
        assert judge_shared("", scores.__getitem__, ranks=ranks) == {}
        assert all(found[name].scores == {name: 1 / 3} and math.isnan(found[name].loss) for name in "abc")
