"""Scores under every routing: equal to running each row alone, and each (adapter, row) runs once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.engines.adapters.evaluation import score_routings as module
from flatout.engines.adapters.evaluation.results import ROUTINGS, Evaluation
from flatout.engines.adapters.evaluation.score_routings import (
    READ,
    Plan,
    Subject,
    make_plans,
    pairs_to_run,
    score_routings,
)
from flatout.engines.adapters.routing.features import features_of
from flatout.engines.adapters.routing.router import Decider, Route, Router
from flatout.engines.adapters.tasks.task import Prediction
from tests.support.adapters import NAMES, CountingEncoder, subjects, tiny_encoder, tiny_tokenizer

ROWS, THRESHOLD = 12, 0.5


@pytest.fixture(scope="module")
def encoder() -> Iterator[CountingEncoder]:
    with tiny_encoder() as opened:
        yield opened


@pytest.fixture(scope="module")
def rows(encoder: CountingEncoder) -> dict[str, Subject]:
    tokenizer = tiny_tokenizer()
    return {
        name: replace(
            subject,
            features=features_of(encoder, subject.examples, pad_id=tokenizer.pad_token_id, fingerprint=""),
        )
        for name, subject in subjects(encoder, rows=ROWS).items()
    }


@pytest.fixture(scope="module")
def router(rows: Mapping[str, Subject]) -> Router:
    """A router that is right about most rows and wrong about some."""
    torch.manual_seed(0)
    features = torch.cat([subject.features for subject in rows.values() if subject.features is not None])
    made = Router(features.shape[1], num_tasks=3, hidden=(16,), dropout=0.0)
    tasks = torch.arange(3).repeat_interleave(ROWS)
    tasks[::7] = (tasks[::7] + 1) % 3
    search = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for _ in range(120):
        search.zero_grad()
        torch.nn.functional.nll_loss(made(features).log_probabilities, tasks).backward()
        search.step()
    return made


def run(rows: Mapping[str, Subject], encoder: CountingEncoder, **options: Any) -> Evaluation:
    tokenizer = tiny_tokenizer()
    values: dict[str, Any] = {"tokens": 700, **options}
    return score_routings(rows, encoder=encoder, tokenizer=tokenizer, pad_id=tokenizer.pad_token_id, **values)


def one_by_one(
    encoder: CountingEncoder, subject: Subject, weights_NT: Tensor
) -> tuple[dict[str, float], list[str | None]]:
    """The same, plainly: every row alone through a mixture of all adapters."""
    tokenizer = tiny_tokenizer()
    said = []
    for row, example in enumerate(subject.examples):
        batch = subject.task.collate([example], adapter=0, pad_id=tokenizer.pad_token_id)
        with torch.no_grad():
            (states,) = encoder((batch.block,), mixture=weights_NT[row : row + 1])
        said += subject.task.predict(
            subject.head, states, batch, tokenizer=tokenizer, records=subject.records
        )
    return subject.task.score(said, subject.records), [each.text for each in said]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines are written out, too."""
    monkeypatch.setattr(module, "READ", ROUTINGS)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("top_k", [1, 2])
def test_every_score_is_that_of_rows_run_alone(
    rows: dict[str, Subject], encoder: CountingEncoder, router: Router, top_k: int
) -> None:
    decider = Decider(router=router, top_k=top_k, threshold=THRESHOLD, fallback="uniform")
    found = run(rows, encoder, decider=decider, num_shown=ROWS)
    for number, (name, subject) in enumerate(rows.items()):
        assert subject.features is not None
        expected = {
            ("oracle", None): torch.eye(3)[[number] * ROWS],
            ("routed", None): decider.route(subject.features).weights,
            ("uniform", None): torch.full((ROWS, 3), 1 / 3),
            **{("single", other): torch.eye(3)[[place] * ROWS] for place, other in enumerate(NAMES)},
        }
        scored = {(each.routing, each.adapter): each.by_task[name] for each in found.scores}
        for key, weights in expected.items():
            scores, texts = one_by_one(encoder, subject, weights)
            assert scored[key] == pytest.approx(scores), (name, key)  # type: ignore[index]
            shown = [row.answers.get(key[0]) for row in found.shown if row.task == name]
            if key[0] in ("oracle", "routed"):
                assert shown == texts
    assert {each.routing for each in found.scores} == set(ROUTINGS)
    # Adapters that change nothing, or a router that is always sure, would make this test say nothing.
    assert len({str(each.by_task) for each in found.scores if each.adapter}) == 3
    assert found.routing is not None and 0 < found.routing.sure_share < 1


def test_each_adapter_and_row_runs_once(
    rows: dict[str, Subject], encoder: CountingEncoder, router: Router
) -> None:
    encoder.passes.clear()
    run(rows, encoder, decider=Decider(router=router))
    alone = sum(num_rows for _, num_rows, _, mixed in encoder.passes if not mixed)
    mixed = sum(num_rows for _, num_rows, _, mixed in encoder.passes if mixed)
    assert alone == 3 * 3 * ROWS  # oracle, routed, random and the three single adapters, together
    assert mixed == 3 * ROWS  # uniform
    longest = max(len(example.ids) for subject in rows.values() for example in subject.examples) + 8
    assert max(tokens for _, _, tokens, _ in encoder.passes) <= max(700, longest)


def test_end_to_end_a_row_taken_for_another_task_is_not_answered(
    rows: dict[str, Subject], encoder: CountingEncoder, router: Router
) -> None:
    decider = Decider(router=router)
    found = run(rows, encoder, decider=decider, routings=("routed", "end-to-end"))
    for number, (name, subject) in enumerate(rows.items()):
        assert subject.features is not None
        route = decider.route(subject.features)
        weights = torch.eye(3)[route.chosen[:, 0]]
        _, texts = one_by_one(encoder, subject, weights)
        answered = [
            Prediction(text=text if chosen == number else "")
            for text, chosen in zip(texts, route.chosen[:, 0].tolist(), strict=True)
        ]
        expected = subject.task.score(answered, subject.records)
        scored = next(each.by_task[name] for each in found.scores if each.routing == "end-to-end")
        expected.pop("token_accuracy", None)  # texts do not tell it
        assert {key: scored[key] for key in expected} == pytest.approx(expected)
        assert scored.get("token_accuracy", 0) <= found.scores[0].by_task[name].get("token_accuracy", 0)
    assert found.routing is not None and found.routing.accuracy_share < 1
    assert found.scores[0].by_task != found.scores[1].by_task


def test_only_what_is_asked_for_runs(rows: dict[str, Subject], encoder: CountingEncoder) -> None:
    encoder.passes.clear()
    found = run(rows, encoder, routings=("oracle", "random"))
    assert 3 * ROWS < sum(num_rows for _, num_rows, _, _ in encoder.passes) <= 3 * ROWS + 3 * ROWS
    assert [(each.routing, each.adapter) for each in found.scores] == [("oracle", None), ("random", None)]
    encoder.passes.clear()
    found = run(rows, encoder, routings=("oracle", "single"))
    assert sum(num_rows for _, num_rows, _, _ in encoder.passes) == 3 * 3 * ROWS
    assert found.routing is None and found.score("qa", "routed") is None
    assert found.score("qa", "oracle") == found.score("qa", "single", adapter="qa")


def test_baselines_are_not_written_out(
    rows: dict[str, Subject], encoder: CountingEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = run(rows, encoder)
    monkeypatch.setattr(module, "READ", ROUTINGS)
    whole = run(rows, encoder)
    written = {(each.routing, each.adapter): set(each.by_task["translation"]) for each in brief.scores}
    every = written["oracle", None]
    assert "token_accuracy" in every and len(every) > 1
    assert written["single", "translation"] == every  # the oracle's answers, which are there
    assert written["single", "qa"] == written["uniform", None] == {"token_accuracy"}
    for one, other in zip(brief.scores, whole.scores, strict=True):
        assert set(other.by_task["translation"]) == every
        for task, scores in one.by_task.items():
            assert scores == pytest.approx({key: other.by_task[task][key] for key in scores})


def test_random_routing_is_drawn_from_the_seed(rows: dict[str, Subject], encoder: CountingEncoder) -> None:
    first, again = (run(rows, encoder, routings=("random",), seed=5) for _ in range(2))
    assert first.scores == again.scores


def test_the_router_is_judged_on_the_same_rows(
    rows: dict[str, Subject], encoder: CountingEncoder, router: Router
) -> None:
    found = run(rows, encoder, decider=Decider(router=router, threshold=0.5), routings=("oracle",)).routing
    assert found is not None
    assert [sum(line) for line in found.confusion] == [ROWS] * 3
    assert 0.5 < found.accuracy_share < 1
    assert sum(each.num_rows for each in found.bins) == 3 * ROWS


@pytest.mark.usefixtures("written")
def test_heads_without_adapters_are_scored_alike() -> None:
    with tiny_encoder(ranks=(0, 0, 0)) as plain:
        found = run(subjects(plain), plain, routings=("oracle", "single", "uniform"))
    scores = {str(each.by_task) for each in found.scores}
    assert len(scores) == 1


def test_dropout_of_heads_is_off_and_modes_are_left_alone(
    rows: dict[str, Subject], encoder: CountingEncoder
) -> None:
    for subject in rows.values():
        subject.head.train()
    first, again = (run(rows, encoder, routings=("oracle",)) for _ in range(2))
    assert first.scores == again.scores
    assert all(subject.head.training for subject in rows.values())


def routes(rows: int, num_tasks: int, seed: int) -> Route:
    """Every other row under one adapter, the rest under two."""
    probabilities = torch.rand(rows, num_tasks, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    top = probabilities.topk(min(2, num_tasks))
    weights = torch.zeros(rows, num_tasks).scatter(1, top.indices, top.values)
    weights[::2] = torch.nn.functional.one_hot(top.indices[::2, 0], num_tasks).float()
    return Route(
        chosen=top.indices,
        weights=weights / weights.sum(dim=-1, keepdim=True),
        probabilities=probabilities,
        confidence=torch.ones(rows),
        is_sure=torch.ones(rows, dtype=torch.bool),
    )


def all_plans(number: int, rows: int, num_tasks: int, seed: int) -> list[Plan]:
    route = routes(rows, num_tasks, seed)
    return make_plans(number, num_rows=rows, num_tasks=num_tasks, routings=ROUTINGS, route=route, seed=seed)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 1000), st.data())
def test_every_pair_is_there_once_and_none_is_missing(
    rows: int, num_tasks: int, seed: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, num_tasks - 1))
    plans = all_plans(number, rows, num_tasks, seed)
    asked = pairs_to_run(plans)
    pairs = [(adapter, row) for (adapter, _), found in asked.items() for row in found]
    assert len(pairs) == len(set(pairs))
    needed = set()
    read = set()
    for plan in plans:
        assert torch.allclose(plan.weights.sum(dim=-1), torch.ones(rows))
        for row in range(rows):
            used = [task for task in range(num_tasks) if plan.weights[row, task] > 0]
            if len(used) > 1:
                continue
            needed.add((used[0], row))
            if plan.routing in READ:
                read.add((used[0], row))
    assert set(pairs) == needed
    written = {(adapter, row) for (adapter, write), found in asked.items() if write for row in found}
    assert written == read


def test_each_routing_is_what_its_name_says() -> None:
    plans = {(plan.routing, plan.adapter): plan for plan in all_plans(1, 40, 3, seed=0)}
    assert plans["oracle", None].sole() == [1] * 40
    assert plans["single", 2].sole() == [2] * 40
    assert plans["uniform", None].sole() == [None] * 40
    assert set(plans["random", None].sole()) == {0, 1, 2}
    assert plans["routed", None].sole().count(None) == 20
    assert len(plans) == len(ROUTINGS) - 1 + 2  # no plan of end-to-end, three single ones


def test_random_adapters_are_those_of_the_seed_and_the_task() -> None:
    first, again, other, task = (
        make_plans(number, num_rows=30, num_tasks=4, routings=["random"], route=None, seed=seed)
        for number, seed in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first[0].weights, again[0].weights)
    assert not torch.equal(first[0].weights, other[0].weights)
    assert not torch.equal(first[0].weights, task[0].weights)


@pytest.mark.parametrize("routings", [("routed",), ("routed", "end-to-end")])
def test_without_a_route_nothing_is_routed(routings: tuple[str, ...]) -> None:
    chosen = [routing for routing in ROUTINGS if routing in routings]
    assert make_plans(0, num_rows=3, num_tasks=2, routings=chosen, route=None, seed=0) == []
