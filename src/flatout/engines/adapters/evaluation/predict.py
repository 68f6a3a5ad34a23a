"""Answer a text: choose its task, then run that task's head.

The router reads the frozen features of the text and picks the adapter; that task's head answers.  With a
context the text is encoded as a pair, and only tasks that take a pair can answer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.engines.adapters.assembly import AdapterAssembly, TaskPart
from flatout.engines.adapters.routing.features import features_of
from flatout.engines.adapters.tasks.data_rows import Record
from flatout.engines.adapters.training.batches import encode_batch, evaluation_batches
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one text; `confidence` is None if the router was not asked."""

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
    if task is None and len(assembly.names) == 1:
        (task,) = assembly.names  # there is nothing to route
    if task is not None:
        part = assembly.parts[assembly.names[assembly.bank.number(task)]]
        weights = F.one_hot(torch.tensor([part.adapter]), len(assembly.names)).float()
        records = [record_of(part, text, context=context) for text in texts]
        return [Answer(task=task, text=_say(assembly, part, record, weights)) for record in records]
    if not routed:
        raise BadInput(
            "the run has no router yet", hint=f"train --phase 2, or give --task {assembly.names[0]}"
        )
    return [_answer_routed(assembly, text, context=context) for text in texts]


def _answer_routed(assembly: AdapterAssembly, text: str, *, context: str | None) -> Answer:
    able = [part for part in assembly.parts.values() if takes_context(part) == (context is not None)]
    if not able:
        asked = "without a context" if context is None else "with a context"
        raise BadInput(f"no task of this run takes a text {asked}", hint="give --task")
    # Tasks of one kind read a text alike, whichever will answer it.
    record = record_of(able[0], text, context=context)
    example = able[0].task.encode(record, assembly.tokenizer, max_length=able[0].max_length)
    route = assembly.decider.route(
        features_of(assembly.encoder, [example], pad_id=assembly.pad_id, fingerprint=assembly.fingerprint)
    )
    confidence, weights = float(route.confidence[0]), route.weights.cpu().float()
    part = assembly.parts[assembly.names[int(route.chosen[0, 0])]]
    if part not in able:
        raise BadInput(
            f"the router assigns the text to {part.name} ({confidence:.0%}), which {_need(part)}",
            hint="give --context" if context is None else f"give --task {able[0].name}",
        )
    mixed = zip(assembly.names, weights[0].tolist(), strict=True)
    return Answer(
        task=part.name,
        text=_say(assembly, part, record_of(part, text, context=context), weights),
        confidence=confidence,
        weights={name: weight for name, weight in mixed if weight},
    )


def takes_context(part: TaskPart) -> bool:
    return part.task.context is not None


def _need(part: TaskPart) -> str:
    return "needs a context" if takes_context(part) else "takes no context"


def record_of(part: TaskPart, text: str, *, context: str | None) -> Record:
    """Make a record of a task from a text, without its answer."""
    if takes_context(part) != (context is not None):
        raise BadInput(f"{part.name} {_need(part)}", hint="give --context" if context is None else "omit it")
    row = {name: context if name == part.task.context else text for name in part.task.inputs}
    return part.task.record_of(row, answered=False)


@torch.no_grad()
def _say(assembly: AdapterAssembly, part: TaskPart, record: Record, weights_1T: Tensor) -> str:
    """Answer under a mixture of adapters; one that has the whole weight runs alone."""
    sole = int(weights_1T.argmax()) if float(weights_1T.max()) == 1.0 else None
    (batch,) = evaluation_batches(
        part.task,
        [part.task.encode(record, assembly.tokenizer, max_length=part.max_length)],
        adapter=part.adapter if sole is None else sole,
        tokens=assembly.settings.evaluation.tokens,
        pad_id=assembly.pad_id,
        device=assembly.device,
    )
    states_BLH = encode_batch(assembly.encoder, batch, weights_NT=weights_1T if sole is None else None)
    (said,) = part.task.predict(part.head, states_BLH, batch, tokenizer=assembly.tokenizer, records=[record])
    return said.text or ""
