"""Scores on held-out rows while the adapters learn.

Batches are made once.  One pass of the encoder gives a batch's loss and its predictions, and only these are
kept: memory is that of one batch, however many rows there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.engines.adapters.assembly import AdapterAssembly, TaskSplit
from flatout.engines.adapters.tasks.task import Prediction, TaskBatch, at_rest
from flatout.engines.adapters.training.batches import encode_batch, evaluation_batches
from flatout.engines.run.ranks import Ranks
from flatout.ground.codec import decode, encode

LOSS = "loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScores:
    """A task on held-out rows: scores in points, and the mean loss."""

    scores: dict[str, float]
    loss: float

    def all(self) -> dict[str, float | None]:
        return {**self.scores, LOSS: self.loss}


class Validation:
    """Held-out rows of every task, ready to be run again and again."""

    def __init__(self, assembly: AdapterAssembly, *, rows: int) -> None:
        self._assembly = assembly
        self.rows: dict[str, TaskSplit] = {
            name: assembly.rows(name, "validation", number=rows) for name in assembly.names
        }
        missing = (assembly.missing_classes(name, "validation", number=rows) for name in assembly.names)
        self.notes = [note for note in missing if note is not None]
        self._batches: dict[str, list[TaskBatch]] = {
            name: list(
                evaluation_batches(
                    part.task,
                    self.rows[name].examples,
                    adapter=part.adapter,
                    tokens=assembly.settings.evaluation.tokens,
                    pad_id=assembly.pad_id,
                    device=assembly.device,
                )
            )
            for name, part in assembly.parts.items()
        }

    def judge(self, name: str, *, weights_NT: Tensor | None = None) -> HeldOutScores:
        """Judge a task under its own adapter, or under a mixture with these weights of its rows."""
        assembly, part, rows = self._assembly, self._assembly.parts[name], self.rows[name]
        said: dict[int, Prediction] = {}
        losses, counts = [], []
        with at_rest(*assembly.modules().values()):
            for batch in self._batches[name]:
                states_BLH = encode_batch(assembly.encoder, batch, weights_NT=weights_NT)
                losses.append(part.task.loss(part.head, states_BLH, batch).float() * batch.count)
                counts.append(batch.count)
                predictions = part.task.predict(
                    part.head,
                    states_BLH,
                    batch,
                    tokenizer=assembly.tokenizer,
                    records=rows.records,
                    write=False,
                )
                said.update(zip(batch.indices, predictions, strict=True))
        scores = part.task.score([said[index] for index in sorted(said)], rows.records)
        loss = torch.stack(losses).sum() / torch.stack(counts).sum().clamp_min(1)
        return HeldOutScores(scores=scores, loss=float(loss))


def judge_shared(
    names: Sequence[str], judge: Callable[[str], HeldOutScores], *, ranks: Ranks
) -> dict[str, HeldOutScores]:
    """Judge tasks, each on one rank; all ranks get the same scores, so that all decide alike."""
    own = {name: judge(name) for name in names[ranks.rank :: ranks.num_ranks]}
    if ranks.num_ranks == 1 or not names:
        return own
    found: dict[str, HeldOutScores] = {}
    for said in ranks.texts(json.dumps(encode(own))):
        found |= decode(dict[str, HeldOutScores], json.loads(said))
    return {name: found[name] for name in names}
