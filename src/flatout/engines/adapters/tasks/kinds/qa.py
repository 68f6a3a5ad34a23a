"""Question answering: the answer is a span of the context, named by its first and last token.

A line is {"context": "...", "question": "...", "answer": "...", "start": 427}, `start` being the place of the
answer's first character (found in the context where it is not given).  Characters are not tokens: the
tokenizer says which characters each token stands for, and the targets are the tokens that overlap the answer.

A context that does not fit `max_length` is cut to the window that holds most of the question's words, rare
ones counting more.  The rule does not look at the answer, so it is the same in training and in use; where the
answer is outside, there is nothing to learn from the row, and training leaves it out and counts it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.engines.adapters.lora.chunked_loss import IGNORED
from flatout.engines.adapters.lora.token_blocks import Ints, Padding, Targets
from flatout.engines.adapters.tasks.data_rows import Record, text_field
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.adapters.tasks.metrics import exact_match, span_f1
from flatout.engines.adapters.tasks.task import (
    AdapterTask,
    Asked,
    Example,
    Prediction,
    TaskBatch,
    example_of_pair,
)
from flatout.ground.errors import BadInput

OUTSIDE = -1  # the offset of a token that is not of the context
QUESTION_SHARE = 3  # a question gets at most a third of the tokens


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(AdapterTask):
    """A span of the context for a question."""

    max_answer_tokens: int = 30

    name: ClassVar[str] = "qa"
    metric: ClassVar[str] = "f1"
    inputs: ClassVar[tuple[str, ...]] = ("context", "question")
    answers: ClassVar[tuple[str, ...]] = ("answer", "start")
    context: ClassVar[str | None] = "context"

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        answer = text_field(row, "answer")
        start = row.get("start")
        if start is None:
            start = record["context"].find(answer)
        is_place = isinstance(start, int) and start >= 0
        if not is_place or record["context"][start : start + len(answer)] != answer:
            raise BadInput(
                f"the answer {answer[:40]!r} is not in the context at 'start'={start!r}",
                hint="start is the number of the answer's first character; omit it to search for the answer",
            )
        return {"answer": answer, "start": start}

    def group_of(self, record: Record) -> str:
        """Keep questions on one context together."""
        return str(record["context"])

    def generated_row(self, draw: random.Random) -> Record:
        facts, kinds = [], ("lives in", "keeps", "works as")
        for name in draw.sample(_NAMES, 3):
            values = (draw.choice(_TOWNS), draw.choice(_ANIMALS), draw.choice(_WORK))
            facts += [(name, kind, value) for kind, value in zip(kinds, values, strict=True)]
        draw.shuffle(facts)
        asked = draw.randrange(len(facts))
        sentences = [f"{name} {kind} {value}." for name, kind, value in facts]
        name, kind, answer = facts[asked]
        question = {
            "lives in": "Where does {} live?",
            "keeps": "What does {} keep?",
            "works as": "What is the work of {}?",
        }
        start = len(" ".join(sentences[:asked])) + bool(asked) + len(f"{name} {kind} ")
        return {
            "context": " ".join(sentences),
            "question": question[kind].format(name),
            "answer": answer,
            "start": start,
        }

    def encode(self, record: Record, tokenizer: Any, *, max_length: int, index: int = 0) -> Example:
        window = _Window.of(record["context"], record["question"], tokenizer, max_length=max_length)
        encoded = window.encoded
        offsets = np.array(encoded["offset_mapping"], dtype=np.int32) + window.start
        inside = np.array([part == 1 for part in encoded.sequence_ids()])
        offsets[~inside] = OUTSIDE
        targets = {}
        if "answer" in record:
            span = token_span(offsets, start=record["start"], stop=record["start"] + len(record["answer"]))
            if span is not None:
                targets = {"start": np.array(span[0], np.int32), "end": np.array(span[1], np.int32)}
        return example_of_pair(encoded, index=index, targets=targets, offsets=offsets)

    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        ends = {name: np.full(to.rows, IGNORED, dtype=np.int64) for name in ("start", "end")}
        allowed = np.zeros((to.rows, to.length), dtype=np.bool_)
        for row, example in enumerate(examples):
            assert example.offsets is not None
            allowed[row, : len(example.ids)] = example.offsets[:, 0] != OUTSIDE
            for name, token in example.targets.items():
                ends[name][row] = token
        return {**ends, "allowed": allowed}

    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        return nn.Linear(width, 2)

    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        start_BL, end_BL = span_logits(head, states_BLH, batch)
        summed = sum(
            F.cross_entropy(logits, batch.targets[name], ignore_index=IGNORED, reduction="sum")
            for name, logits in (("start", start_BL), ("end", end_BL))
        )
        return torch.as_tensor(summed) / (2 * batch.count.clamp_min(1))

    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        spans = best_spans(*span_logits(head, states_BLH, batch), longest=self.max_answer_tokens).tolist()
        texts = []
        for example, (first, last) in zip(batch.examples, spans, strict=False):
            assert example.offsets is not None
            context = asked.records[example.index]["context"]
            texts.append(context[max(example.offsets[first, 0], 0) : max(example.offsets[last, 1], 0)])
        return [Prediction(text=text) for text in texts]

    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        true = [record["answer"] for record in records]
        return {"f1": span_f1(said, true), "exact_match": exact_match(said, true)}


def token_span(offsets: Ints, *, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and last token of the characters [start, stop); None where some are cut off."""
    inside = offsets[:, 0] != OUTSIDE
    overlapping = np.flatnonzero(inside & (offsets[:, 1] > start) & (offsets[:, 0] < stop))
    if not len(overlapping):
        return None
    first, last = int(overlapping[0]), int(overlapping[-1])
    # Cut off at the window's edge, the tokens that are left are not the answer.
    edges = np.flatnonzero(inside)[[0, -1]]
    cut_before = first == edges[0] and offsets[first, 0] > start
    cut_after = last == edges[1] and offsets[last, 1] < stop
    return None if cut_before or cut_after else (first, last)


def span_logits(head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """Return logits [B, L] of the first and the last token; the lowest number outside the context."""
    weight = next(head.parameters())
    logits_BL2 = head(states_BLH.to(weight.dtype)).float()
    shut = ~batch.targets["allowed"].unsqueeze(2)
    start_BL, end_BL = logits_BL2.masked_fill(shut, torch.finfo(torch.float32).min).unbind(2)
    return start_BL, end_BL


def best_spans(start_BL: Tensor, end_BL: Tensor, *, longest: int) -> Tensor:
    """Return [B, 2]: first and last token of the most likely span of at most `longest` tokens."""
    length = start_BL.shape[1]
    # Halves, so that two of the lowest numbers do not overflow.
    scores_BLL = start_BL.unsqueeze(2) / 2 + end_BL.unsqueeze(1) / 2
    within = torch.ones(length, length, dtype=torch.bool, device=start_BL.device).triu().tril(longest - 1)
    best_B = scores_BLL.masked_fill(~within, -torch.inf).flatten(1).argmax(1)
    return torch.stack([best_B // length, best_B % length], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """A question and what fits of its context, as tokens; `start` is the window's first character."""

    encoded: Any
    start: int

    @classmethod
    def of(cls, context: str, question: str, tokenizer: Any, *, max_length: int) -> _Window:
        if not getattr(tokenizer, "is_fast", False):
            raise BadInput(
                "the tokenizer does not say which characters a token stands for", hint="use a fast one"
            )
        told = {"return_offsets_mapping": True, "verbose": False}
        whole = tokenizer(question, context, return_token_type_ids=True, **told)
        if len(whole["input_ids"]) <= max_length:
            return cls(encoded=whole, start=0)
        asked = tokenizer(question, add_special_tokens=False, **told)
        given = tokenizer(context, add_special_tokens=False, **told)
        num_asked = min(len(asked["input_ids"]), max(1, max_length // QUESTION_SHARE))
        room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - num_asked
        if room < 1:
            raise BadInput(f"max_length={max_length} leaves no room for a context", hint="give 32 or more")
        first, last = 0, len(given["input_ids"]) - 1
        if last >= room:
            first = _first_token(given, set(asked["input_ids"]), room=room)
            last = first + room - 1
        start, stop = given["offset_mapping"][first][0], given["offset_mapping"][last][1]
        cut = tokenizer(
            question[: asked["offset_mapping"][num_asked - 1][1]],
            context[start:stop],
            truncation="only_second",
            max_length=max_length,
            return_token_type_ids=True,
            **told,
        )
        return cls(encoded=cut, start=start)


def _first_token(given: Any, asked: set[int], *, room: int) -> int:
    """Return where the window of `room` tokens with most of `asked` begins: the first one, at a word."""
    ids, words = given["input_ids"], given.word_ids()
    counts = Counter(ids)
    worth = np.array([1 / counts[token] if token in asked else 0.0 for token in ids])
    sums = np.concatenate([[0.0], np.cumsum(worth)])
    held = sums[room:] - sums[:-room]
    begins = np.array([place == 0 or words[place] != words[place - 1] for place in range(len(held))])
    return int(np.where(begins, np.round(held, 9), -1.0).argmax())


# A generated world: who lives where and keeps what.
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea", "Otto")
_TOWNS = ("Paris", "Oslo", "Rome", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Bern", "Prague", "Dublin")
_ANIMALS = ("a grey cat", "an old dog", "two white mice", "a small owl", "three hens", "a brown horse")
_WORK = ("a baker", "a painter", "a sailor", "a tall doctor", "a young teacher", "a night guard")
