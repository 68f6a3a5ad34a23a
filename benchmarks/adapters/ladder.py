"""From a loop as people write it to one recorded pass, one change at a time.

The rows are the same on every rung: 16 of each of five tasks, of similar length within a task and of about
140 tokens on the average.  Sentiment has a class per row, question answering a start and an end, and each of
three generation tasks target tokens at about a fifth of its positions, with a vocabulary matrix of its own.

    as written         each task alone; rows padded to 512; the span head called once per row and position;
                       vocabulary logits at every position
    one head call      the span head called once
    own lengths        rows padded to the longest of their batch
    logits at targets  vocabulary logits where there is a target
    one pass           the five adapters in one batch
    recorded           the step as a CUDA graph (GPU)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from arms import Fused, Sequential
from models import NAMES
from torch import Tensor, nn

from flatout.engines.adapters.lora.token_blocks import TokenBlock

LENGTHS = {"sentiment": 28, "qa": 180, "summarisation": 260, "code": 90, "translation": 142}
TARGETS = {"summarisation": 50, "code": 20, "translation": 30}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one task, as one rung of the ladder wants them."""

    block: TokenBlock
    targets: dict[str, Tensor]
    looped: bool  # the span head once per row and position
    everywhere: bool  # vocabulary logits at every position


def rows_of(
    *,
    rows: int,
    padded: int | None,
    scale: float,
    vocabulary: int,
    device: str,
    looped: bool,
    everywhere: bool,
) -> list[Rows]:
    """The rows of all tasks; the same tokens for the same sizes."""
    found = []
    for adapter, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(adapter)
        longest = max(4, int(LENGTHS[name] * scale))
        lengths = torch.randint(max(2, int(0.85 * longest)), longest + 1, (rows,), generator=generator)
        width = padded or -(-int(lengths.max()) // 8) * 8
        ids = torch.randint(5, vocabulary, (rows, longest), generator=generator)
        ids = F.pad(ids[:, : min(longest, width)], (0, max(0, width - longest)), value=1)
        ids = ids.masked_fill(torch.arange(width) >= lengths[:, None], 1)
        targets: dict[str, Tensor] = {}
        if name == "sentiment":
            targets["classes"] = torch.randint(2, (rows,), generator=generator)
        elif name == "qa":
            targets["starts"] = (torch.rand(rows, generator=generator) * lengths).long()
            targets["ends"] = targets["starts"]
        else:
            count = max(1, int(TARGETS[name] * scale))
            words = torch.randint(5, vocabulary, (rows, count), generator=generator)
            targets["words"] = F.pad(words, (0, width - count), value=-100) if everywhere else words
        found.append(
            Rows(
                block=TokenBlock(adapter=adapter, ids=ids.to(device), lengths=lengths.to(device)),
                targets={key: value.to(device) for key, value in targets.items()},
                looped=looped,
                everywhere=everywhere,
            )
        )
    return found


def heads(width: int, vocabulary: int, device: str) -> dict[str, nn.Module]:
    """The heads of the original: a classifier, spans, and a vocabulary matrix per generation task."""
    torch.manual_seed(0)
    sizes = {"sentiment": 2, "qa": 2}
    return {name: nn.Linear(width, sizes.get(name, vocabulary), device=device) for name in NAMES}


def task_loss(head: nn.Module, states: Tensor, batch: Rows) -> Tensor:
    """The loss of one task, by its targets."""
    targets = batch.targets
    if "classes" in targets:
        return F.cross_entropy(head(states[:, 0]).float(), targets["classes"])
    if "starts" in targets:
        if batch.looped:
            spans = torch.stack(
                [torch.stack([head(state[place]) for place in range(len(state))]) for state in states]
            )
        else:
            spans = head(states)
        mask = ~batch.block.mask()
        starts, ends = spans.float().masked_fill(mask[..., None], -1e4).unbind(-1)
        return (F.cross_entropy(starts, targets["starts"]) + F.cross_entropy(ends, targets["ends"])) / 2
    words = targets["words"]
    logits = head(states[:, : words.shape[1]])
    return F.cross_entropy(logits.flatten(0, 1).float(), words.flatten(), ignore_index=-100)


Arm = Callable[[], None]


def rungs(model: Any, *, rows: int, padded: int, scale: float, device: str) -> dict[str, Callable[[], Arm]]:
    """A maker for each rung: an arm with everything bound."""
    vocabulary, width = model.config.vocab_size, model.config.hidden_size

    def given(**changes: Any) -> list[Rows]:
        base = {"padded": None, "looped": False, "everywhere": False} | changes
        return rows_of(rows=rows, scale=scale, vocabulary=vocabulary, device=device, **base)

    def alone(**changes: Any) -> Arm:
        arm = Sequential(model, heads=heads(width, vocabulary, device), loss=task_loss)
        batches = given(**changes)
        masks = [batch.block.mask().long() for batch in batches]

        def step() -> None:
            for number, (batch, mask) in enumerate(zip(batches, masks, strict=True)):
                arm.train_one(number, batch, ids=batch.block.ids, mask=mask)

        return step

    def together(graph: Literal["on", "off"]) -> Arm:
        arm = Fused(model, graph=graph, heads=heads(width, vocabulary, device), loss=task_loss)
        batches = given()
        return lambda: arm(batches)

    found: dict[str, Callable[[], Arm]] = {
        "as written": lambda: alone(padded=padded, looped=True, everywhere=True),
        "one head call": lambda: alone(padded=padded, everywhere=True),
        "own lengths": lambda: alone(everywhere=True),
        "logits at targets": alone,
        "one pass": lambda: together("off"),
    }
    if device != "cpu":
        found["recorded"] = lambda: together("on")
    return found
