"""A text in, a task and its answer out.

The router reads the frozen features of the text and picks the adapter; that task's head answers.  A question
needs what it is about: with a context the text is encoded as a pair, and only tasks that take a pair can
answer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.assembly import AdapterAssembly, TaskPart
from flatout.engines.adapters.routing.features import features_of
from flatout.engines.adapters.tasks import Example, Record
from flatout.engines.adapters.training.batches import evaluation_batches
from flatout.errors import BadInput

TEXT, CONTEXT = "text", "context"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the run says to one text; `confidence` is None where the router was not asked."""

    task: str
    text: str
    confidence: float | None = None
    weights: dict[str, float] = field(default_factory=dict)  # of the adapters that were mixed


def answer(
    assembly: AdapterAssembly,
    texts: Sequence[str],
    *,
    context: str | None = None,
    task: str | None = None,
    routed: bool = True,
) -> list[Answer]:
    """Answer every text under the task that the router picks, or under `task`."""
    if task is not None:
        assembly.bank.number(task)
        return [_forced(assembly, text, context=context, name=task) for text in texts]
    if not routed:
        raise BadInput(
            "the run has no router yet", hint=f"train --phase 2, or give --task {assembly.names[0]}"
        )
    return [_routed(assembly, text, context=context) for text in texts]


def _forced(assembly: AdapterAssembly, text: str, *, context: str | None, name: str) -> Answer:
    part = assembly.parts[name]
    record = record_of(part, text, context=context)
    weights = F.one_hot(torch.tensor([part.adapter]), len(assembly.names)).float()
    return Answer(task=name, text=_said(assembly, part, record, weights_1T=weights))


def _routed(assembly: AdapterAssembly, text: str, *, context: str | None) -> Answer:
    asked = "with a context" if context is not None else "without a context"
    able = [part for part in assembly.parts.values() if takes_context(part) == (context is not None)]
    if not able:
        raise BadInput(f"no task of this run takes a text {asked}", hint="give --task")
    # Tasks of one kind read a text alike, whichever will answer it.
    example = _encoded(assembly, able[0], record_of(able[0], text, context=context))
    route = assembly.route(
        features_of(assembly.encoder, [example], pad_id=assembly.pad_id, fingerprint=assembly.fingerprint)
    )
    chosen = assembly.names[int(route.chosen[0, 0])]
    part = assembly.parts[chosen]
    if part not in able:
        needs = "needs a context" if takes_context(part) else "takes no context"
        raise BadInput(
            f"the router takes the text for {chosen} ({float(route.confidence[0]):.0%}), which {needs}",
            hint="give --context" if context is None else f"give --task {able[0].name}",
        )
    weights = route.weights.cpu().float()
    return Answer(
        task=chosen,
        text=_said(assembly, part, record_of(part, text, context=context), weights_1T=weights),
        confidence=float(route.confidence[0]),
        weights={
            name: weight for name, weight in zip(assembly.names, weights[0].tolist(), strict=True) if weight
        },
    )


def takes_context(part: TaskPart) -> bool:
    return CONTEXT in part.task.inputs


def record_of(part: TaskPart, text: str, *, context: str | None) -> Record:
    """A text as a record of a task, without its answer."""
    if takes_context(part) != (context is not None):
        needs = "needs a context" if takes_context(part) else "takes no context"
        raise BadInput(f"{part.name} {needs}", hint="give --context" if context is None else "omit it")
    row = {name: context if name == CONTEXT else text for name in part.task.inputs}
    return part.task.record_of(row, answered=False)


def _encoded(assembly: AdapterAssembly, part: TaskPart, record: Record) -> Example:
    return part.task.encode(record, assembly.tokenizer, max_length=part.max_length)


def _said(assembly: AdapterAssembly, part: TaskPart, record: Record, *, weights_1T: Tensor) -> str:
    """The answer under a mixture of adapters; one that has the whole weight runs alone."""
    sole = int(weights_1T.argmax()) if float(weights_1T.max()) == 1.0 else None
    (batch,) = evaluation_batches(
        part.task,
        [_encoded(assembly, part, record)],
        adapter=part.adapter if sole is None else sole,
        tokens=assembly.settings.evaluation.tokens,
        pad_id=assembly.pad_id,
        device=assembly.device,
    )
    mixture = weights_1T.to(assembly.device) if sole is None else None
    with torch.no_grad():
        (states_BLH,) = assembly.encoder((batch.block,), mixture=mixture)
        (said,) = part.task.predict(
            part.head, states_BLH, batch, tokenizer=assembly.tokenizer, records=[record]
        )
    return said.text or ""
