"""Every task's scores under every routing, each (adapter, row) computed once.

A routing gives each row weights over the adapters.  Most routings put the whole weight of a row on one
adapter, and many agree: a router that is right says what the oracle says.  So rows are gathered by the
adapter that any routing puts them under, and each such pair runs once; only true mixtures (uniform, top-k)
need their own pass.  Only predictions are kept: the states of a whole split are never in memory.

    N rows of one task   T adapters, one per task
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.engines.adapters.evaluation.results import (
    ROUTINGS,
    ClassScore,
    Evaluation,
    RoutingName,
    RoutingScores,
    ShownRow,
)
from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.routing.quality import judge_routes
from flatout.engines.adapters.routing.router import Decider, Route
from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.tasks.task import AdapterTask, Example, Prediction
from flatout.engines.adapters.training.batches import encode_batch, evaluation_batches

# People read the answers of these; for the others, the baselines, a metric is enough.
READ: tuple[RoutingName, ...] = ("oracle", "routed")
ALMOST_ONE = 1 - 1e-6
LONGEST_SHOWN = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One task to score: `examples[i]` is `records[i]`; `features` are what the router sees of them."""

    task: AdapterTask
    head: nn.Module
    examples: Sequence[Example]
    records: Sequence[Record]
    features: Tensor | None = None  # [N, width]; only the router needs them


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The weights of one task's rows under one routing."""

    routing: RoutingName
    adapter: int | None  # of "single"
    weights: Tensor  # [N, T], on the host

    def sole(self) -> list[int | None]:
        """Return the adapter that has a row's whole weight, for each row; None where several share it."""
        top = self.weights.max(dim=-1)
        return [
            adapter if weight > ALMOST_ONE else None
            for weight, adapter in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]


def score_routings(
    subjects: Mapping[str, Subject],
    *,
    encoder: PackedEncoder,
    tokenizer: Any,
    pad_id: int,
    decider: Decider | None = None,
    routings: Sequence[RoutingName] = ROUTINGS,
    tokens: int = 8192,
    seed: int = 0,
    num_shown: int = 3,
    split: str = "test",
) -> Evaluation:
    """Score the tasks, in the order of their adapters.

    Without a `decider`, "routed" and "end-to-end" are left out; the latter is derived from the former. Random
    routing is drawn from `seed`.  Tasks that write text write it only under routings whose texts are shown;
    for the baselines they give the scores that need no text.
    """
    started_s = time.perf_counter()
    names = list(subjects)
    routes: dict[str, Route] = {}
    if decider is not None:
        for name, subject in subjects.items():
            assert subject.features is not None, f"routing {name} needs its features"
            routes[name] = decider.route(subject.features)
    runner = _Runner(encoder, tokenizer=tokenizer, pad_id=pad_id, tokens=tokens)
    by_plan: dict[tuple[RoutingName, int | None], dict[str, dict[str, float]]] = {}
    shown: list[ShownRow] = []
    classes: dict[str, dict[str, ClassScore]] = {}
    for number, (name, subject) in enumerate(subjects.items()):
        route = routes.get(name)
        plans = make_plans(
            number,
            num_rows=len(subject.examples),
            num_tasks=len(names),
            routings=routings,
            route=route,
            seed=seed,
        )
        answers = runner.answers(subject, plans, number=number)
        for plan, said in zip(plans, answers, strict=True):
            by_plan.setdefault((plan.routing, plan.adapter), {})[name] = subject.task.score(
                said, subject.records
            )
            if plan.routing == "routed" and route is not None and "end-to-end" in routings:
                answered = _end_to_end(said, route, number=number)
                by_plan.setdefault(("end-to-end", None), {})[name] = subject.task.score(
                    answered, subject.records
                )
        read = {plan.routing: said for plan, said in zip(plans, answers, strict=True) if plan.routing in READ}
        if by_class := _score_classes(subject, read.get("oracle", ())):
            classes[name] = by_class
        shown += _show_rows(name, subject, read, route, names, number=num_shown)
    return Evaluation(
        tasks=tuple(names),
        metrics={name: subject.task.metric for name, subject in subjects.items()},
        num_rows={name: len(subject.examples) for name, subject in subjects.items()},
        scores=tuple(
            RoutingScores(
                routing=routing, adapter=None if adapter is None else names[adapter], by_task=by_task
            )
            for (routing, adapter), by_task in by_plan.items()
        ),
        routing=None if decider is None else judge_routes(routes, decider),
        shown=tuple(shown),
        classes=classes,
        split=split,
        elapsed_s=time.perf_counter() - started_s,
    )


def make_plans(
    number: int,
    *,
    num_rows: int,
    num_tasks: int,
    routings: Sequence[RoutingName],
    route: Route | None,
    seed: int,
) -> list[Plan]:
    """Weigh the rows of task `number` under every routing; "end-to-end" takes the weights of "routed"."""

    def under(adapters_N: Tensor) -> Tensor:
        return F.one_hot(adapters_N, num_tasks).float()

    found: list[tuple[RoutingName, int | None, Tensor]] = []
    for routing in routings:
        if routing == "oracle":
            found.append((routing, None, under(torch.full((num_rows,), number))))
        elif routing == "routed" and route is not None:
            found.append((routing, None, route.weights.cpu().float()))
        elif routing == "single":
            found += [(routing, each, under(torch.full((num_rows,), each))) for each in range(num_tasks)]
        elif routing == "uniform":
            found.append((routing, None, torch.full((num_rows, num_tasks), 1 / num_tasks)))
        elif routing == "random":
            drawn = torch.Generator().manual_seed(seed * 1000 + number)
            found.append((routing, None, under(torch.randint(num_tasks, (num_rows,), generator=drawn))))
    return [Plan(routing=routing, adapter=adapter, weights=weights) for routing, adapter, weights in found]


def pairs_to_run(plans: Sequence[Plan]) -> dict[tuple[int, bool], list[int]]:
    """Return, by (adapter, whether to write answers out), the rows that any plan puts under it alone.

    Writing an answer out costs a pass of the decoder per word, so it is done only for rows that are shown.
    """
    read: dict[tuple[int, int], bool] = {}
    for plan in plans:
        for row, adapter in enumerate(plan.sole()):
            if adapter is not None:
                read[adapter, row] = read.get((adapter, row), False) or plan.routing in READ
    found: dict[tuple[int, bool], list[int]] = {}
    for (adapter, row), is_read in sorted(read.items()):
        found.setdefault((adapter, is_read), []).append(row)
    return found


class _Runner:
    """Runs rows of one task under adapters."""

    def __init__(self, encoder: PackedEncoder, *, tokenizer: Any, pad_id: int, tokens: int) -> None:
        self._encoder, self._tokenizer, self._pad_id, self._tokens = encoder, tokenizer, pad_id, tokens

    def answers(self, subject: Subject, plans: Sequence[Plan], *, number: int) -> list[list[Prediction]]:
        """Return the predictions of every plan, in the order of the records."""
        under: dict[tuple[int, int], Prediction] = {}
        for (adapter, write), rows in pairs_to_run(plans).items():
            for row, said in self._predict(subject, rows, adapter=adapter, write=write):
                under[adapter, row] = said
        found = []
        for plan in plans:
            sole = plan.sole()
            mixed = [row for row, adapter in enumerate(sole) if adapter is None]
            write = plan.routing in READ
            other = dict(self._predict(subject, mixed, adapter=number, write=write, weights_NT=plan.weights))
            found.append(
                [other[row] if adapter is None else under[adapter, row] for row, adapter in enumerate(sole)]
            )
        return found

    @torch.no_grad()
    def _predict(
        self,
        subject: Subject,
        rows: Sequence[int],
        *,
        adapter: int,
        write: bool,
        weights_NT: Tensor | None = None,
    ) -> Iterator[tuple[int, Prediction]]:
        """Yield each row and its prediction, batch by batch."""
        for batch in evaluation_batches(
            subject.task,
            [subject.examples[row] for row in rows],
            adapter=adapter,
            tokens=self._tokens,
            pad_id=self._pad_id,
            device=self._encoder.device,
        ):
            said = subject.task.predict(
                subject.head,
                encode_batch(self._encoder, batch, weights_NT=weights_NT),
                batch,
                tokenizer=self._tokenizer,
                records=subject.records,
                write=write,
            )
            yield from zip(batch.indices, said, strict=True)


def _end_to_end(said: Sequence[Prediction], route: Route, *, number: int) -> list[Prediction]:
    """Count a row that was taken for another task's as not answered."""
    return [
        each if first == number else Prediction(text="", num_targets=each.num_targets)
        for each, first in zip(said, route.chosen[:, 0].tolist(), strict=True)
    ]


def _score_classes(subject: Subject, said: Sequence[Prediction]) -> dict[str, ClassScore]:
    """Return the rows and the points of every class; nothing for a task without classes."""
    if not said:
        return {}
    counts = Counter(subject.task.class_of(record) for record in subject.records)
    points = subject.task.class_scores([each.text or "" for each in said], subject.records)
    return {name: ClassScore(num_rows=counts[name], f1=f1) for name, f1 in points.items()}


def _show_rows(
    name: str,
    subject: Subject,
    read: Mapping[RoutingName, Sequence[Prediction]],
    route: Route | None,
    names: Sequence[str],
    *,
    number: int,
) -> Iterator[ShownRow]:
    """Yield the first rows of a task in the order of its data, not the best ones."""
    known = (*subject.task.inputs, *subject.task.answers)
    for row, record in enumerate(subject.records[:number]):
        yield ShownRow(
            task=name,
            fields={field: str(record[field])[:LONGEST_SHOWN] for field in known if field in record},
            answers={routing: (said[row].text or "")[:LONGEST_SHOWN] for routing, said in read.items()},
            adapter=None if route is None else names[int(route.chosen[row, 0])],
            confidence=None if route is None else float(route.confidence[row]),
        )
