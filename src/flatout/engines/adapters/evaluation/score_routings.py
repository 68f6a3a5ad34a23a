"""Every task's scores under every routing, each (adapter, row) computed once.

Rows go in batches of similar length; of a batch only its predictions stay, so the states of a whole split are
never held.  `routing_plans` says what has to run; a routing's predictions are then picked from what was
computed.

    N rows of one task   T adapters, one per task
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engines.adapters.evaluation.plans import READ, Plan, num_passes, plans_of, wanted
from flatout.engines.adapters.evaluation.results import (
    ROUTINGS,
    Evaluation,
    RoutingName,
    RoutingQuality,
    Scores,
    ShownRow,
)
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.routing.features import LENGTH_MULTIPLE, by_length
from flatout.engines.adapters.routing.quality import judge
from flatout.engines.adapters.routing.router import Fallback, Route, Router
from flatout.engines.adapters.tasks import AdapterTask, Example, Prediction, Record
from flatout.errors import BadInput

LONGEST_SHOWN = 600
OnProgress = Callable[[int, int], None]  # (adapter, row) pairs that are done, pairs in all


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One task to score: `examples[i]` is `records[i]`; `features` are what the router sees of them."""

    task: AdapterTask
    head: nn.Module
    examples: Sequence[Example]
    records: Sequence[Record]
    features: Tensor | None = None  # [N, width]; only the router needs them


@dataclass(frozen=True, kw_only=True, slots=True)
class Decider:
    """A router and how its word is taken."""

    router: Router
    threshold: float = 0.0
    top_k: int = 1
    fallback: Fallback = "best"

    def route(self, features_NH: Tensor) -> Route:
        weight = next(self.router.parameters())
        return self.router.route(
            features_NH.to(weight.device),
            threshold=self.threshold,
            top_k=self.top_k,
            fallback=self.fallback,
        )


def score_routings(
    subjects: Mapping[str, Subject],
    *,
    encoder: PackedEncoder,
    tokenizer: Any,
    pad_id: int,
    decider: Decider | None = None,
    routings: Sequence[RoutingName] = ROUTINGS,
    singles: Sequence[str] | None = None,
    tokens: int = 8192,
    seed: int = 0,
    write_all: bool = False,
    num_shown: int = 3,
    split: str = "test",
    on_progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Score the tasks, in the order of their adapters.

    Without a `decider`, "routed" and "end-to-end" are left out; the latter is derived from the former.
    `singles` names the adapters that all rows are run under, by default each.  Random routing is drawn from
    `seed`.  Tasks that write text do so under the routings that someone reads; of the baselines they give
    the scores that need no text, or with `write_all` every score.
    """
    _check(subjects, routings=routings, singles=singles, decider=decider)
    started_s = time.perf_counter()
    names = list(subjects)
    routes: dict[str, Route] = {}
    if decider is not None:
        routes = {name: decider.route(_features(name, subject)) for name, subject in subjects.items()}
    plans = {
        name: plans_of(
            number,
            num_rows=len(subject.examples),
            num_tasks=len(names),
            routings=routings,
            singles=[names.index(single) for single in (names if singles is None else singles)],
            route=routes.get(name),
            seed=seed,
        )
        for number, (name, subject) in enumerate(subjects.items())
    }
    total = sum(num_passes(each) for each in plans.values())
    runner = _Runner(
        encoder=encoder,
        tokenizer=tokenizer,
        pad_id=pad_id,
        tokens=tokens,
        write_all=write_all,
        on_pairs=lambda done: on_progress(done, total),
    )
    by_plan: dict[tuple[RoutingName, int | None], dict[str, dict[str, float]]] = {}
    shown: list[ShownRow] = []
    for number, (name, subject) in enumerate(subjects.items()):
        answers = runner.answers(subject, plans[name], number=number)
        for routing, adapter, said in _every(plans[name], answers, routes.get(name), number, routings):
            by_plan.setdefault((routing, adapter), {})[name] = subject.task.score(said, subject.records)
        shown += _shown(name, subject, plans[name], answers, routes.get(name), names, number=num_shown)
    return Evaluation(
        tasks=tuple(names),
        metrics={name: subject.task.metric for name, subject in subjects.items()},
        num_rows={name: len(subject.examples) for name, subject in subjects.items()},
        scores=tuple(
            Scores(routing=routing, adapter=None if adapter is None else names[adapter], by_task=by_task)
            for (routing, adapter), by_task in by_plan.items()
        ),
        routing=None if decider is None else judge_routes(routes, decider),
        shown=tuple(shown),
        split=split,
        elapsed_s=time.perf_counter() - started_s,
    )


def judge_routes(routes: Mapping[str, Route], decider: Decider) -> RoutingQuality:
    """How well the router does over all tasks; `routes` in the order of the adapters."""
    found = list(routes.values())
    whole = Route(
        chosen=torch.cat([route.chosen for route in found]),
        weights=torch.cat([route.weights for route in found]),
        probabilities=torch.cat([route.probabilities for route in found]),
        confidence=torch.cat([route.confidence for route in found]),
        is_sure=torch.cat([route.is_sure for route in found]),
    )
    counts = torch.tensor([len(route.chosen) for route in found])
    return judge(
        whole,
        tasks_N=torch.arange(len(found)).repeat_interleave(counts),
        names=list(routes),
        temperature=decider.router.temperature.item(),
        threshold=decider.threshold,
        top_k=decider.top_k,
        fallback=decider.fallback,
    )


class _Runner:
    """Runs rows of one task under adapters, and counts."""

    def __init__(
        self,
        *,
        encoder: PackedEncoder,
        tokenizer: Any,
        pad_id: int,
        tokens: int,
        write_all: bool,
        on_pairs: Callable[[int], None],
    ) -> None:
        self._encoder, self._tokenizer, self._pad_id, self._tokens = encoder, tokenizer, pad_id, tokens
        self._write_all, self._on_pairs, self._done = write_all, on_pairs, 0

    def answers(self, subject: Subject, plans: Sequence[Plan], *, number: int) -> list[list[Prediction]]:
        """The predictions of every plan, in the order of the records."""
        under: dict[int, dict[int, Prediction]] = {}
        for each in wanted(plans, write_all=self._write_all):
            said = self._predictions(subject, each.rows, adapter=each.adapter, write=each.write)
            under.setdefault(each.adapter, {}).update(said)
        return [self._picked(subject, plan, under, number=number) for plan in plans]

    def _picked(
        self, subject: Subject, plan: Plan, under: dict[int, dict[int, Prediction]], *, number: int
    ) -> list[Prediction]:
        sole = plan.sole()
        mixed = [row for row, adapter in enumerate(sole) if adapter is None]
        write = self._write_all or plan.routing in READ
        said = self._predictions(subject, mixed, adapter=number, write=write, weights_NT=plan.weights)
        other = dict(said)
        return [other[row] if adapter is None else under[adapter][row] for row, adapter in enumerate(sole)]

    @torch.no_grad()
    def _predictions(
        self,
        subject: Subject,
        rows: Sequence[int],
        *,
        adapter: int,
        write: bool,
        weights_NT: Tensor | None = None,
    ) -> Iterator[tuple[int, Prediction]]:
        """Each of the rows and its prediction, batch by batch."""
        examples = [subject.examples[row] for row in rows]
        for places in by_length(examples, tokens=self._tokens):
            batch = subject.task.collate(
                [examples[place] for place in places],
                adapter=adapter,
                pad_id=self._pad_id,
                length_multiple=LENGTH_MULTIPLE,
                device=self._encoder.device,
            )
            mixture = None
            chosen = [rows[place] for place in places]
            if weights_NT is not None:
                mixture = weights_NT[chosen].to(self._encoder.device)
            (states_BLH,) = self._encoder((batch.block,), mixture=mixture)
            said = subject.task.predict(
                subject.head,
                states_BLH,
                batch,
                tokenizer=self._tokenizer,
                records=subject.records,
                write=write,
            )
            self._done += len(places)
            self._on_pairs(self._done)
            yield from zip(chosen, said, strict=True)


def _every(
    plans: Sequence[Plan],
    answers: Sequence[Sequence[Prediction]],
    route: Route | None,
    number: int,
    routings: Sequence[RoutingName],
) -> Iterator[tuple[RoutingName, int | None, Sequence[Prediction]]]:
    """The answers of every routing; end-to-end, nothing where a row was taken for another task's."""
    for plan, said in zip(plans, answers, strict=True):
        yield plan.routing, plan.adapter, said
        if plan.routing == "routed" and route is not None and "end-to-end" in routings:
            chosen = route.chosen[:, 0].tolist()
            yield (
                "end-to-end",
                None,
                [
                    each if first == number else Prediction(text="", num_targets=each.num_targets)
                    for each, first in zip(said, chosen, strict=True)
                ],
            )


def _shown(
    name: str,
    subject: Subject,
    plans: Sequence[Plan],
    answers: Sequence[Sequence[Prediction]],
    route: Route | None,
    names: Sequence[str],
    *,
    number: int,
) -> Iterator[ShownRow]:
    """The first rows of a task, as they stand in its data: nobody chose the best."""
    kept = [(plan.routing, said) for plan, said in zip(plans, answers, strict=True) if plan.routing in READ]
    known = (*subject.task.inputs, *subject.task.answers)
    for row in range(min(number, len(subject.examples))):
        record = subject.records[row]
        yield ShownRow(
            task=name,
            fields={field: str(record[field])[:LONGEST_SHOWN] for field in known if field in record},
            answers={routing: (said[row].text or "")[:LONGEST_SHOWN] for routing, said in kept},
            adapter=None if route is None else names[int(route.chosen[row, 0])],
            confidence=None if route is None else float(route.confidence[row]),
        )


def _features(name: str, subject: Subject) -> Tensor:
    if subject.features is None or len(subject.features) != len(subject.examples):
        there = "none" if subject.features is None else str(len(subject.features))
        raise BadInput(
            f"routing {name} needs a feature for each of its {len(subject.examples)} rows, {there} given",
            hint="compute them with features_of",
        )
    return subject.features


def _check(
    subjects: Mapping[str, Subject],
    *,
    routings: Sequence[str],
    singles: Sequence[str] | None,
    decider: Decider | None,
) -> None:
    wrong = [] if subjects else ["no task to evaluate"]
    for name, subject in subjects.items():
        if not subject.examples:
            wrong.append(f"{name} has no row to score")
        elif len(subject.examples) != len(subject.records):
            wrong.append(f"{name} has {len(subject.examples)} examples of {len(subject.records)} records")
    wrong += [
        f"routing {each!r} is none of {', '.join(ROUTINGS)}" for each in routings if each not in ROUTINGS
    ]
    if "end-to-end" in routings and "routed" not in routings:
        wrong.append("end-to-end is derived from routed, which is not asked for")
    wrong += [f"no adapter is called {each!r}" for each in singles or () if each not in subjects]
    if decider is not None and subjects and decider.router.num_tasks != len(subjects):
        wrong.append(f"the router knows {decider.router.num_tasks} tasks, {len(subjects)} are given")
    if wrong:
        raise BadInput("; ".join(wrong))
