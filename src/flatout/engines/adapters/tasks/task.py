"""What a task is: its rows, how they become tokens and targets, its head, its loss and its scores.

A task is one file with one subclass of `AdapterTask`; `known` says where the file may be.  The encoder, its
adapters, the batches and the optimizer know nothing of any task: they see a `TokenBlock`, pass the task the
encoder's states of exactly its own rows, and get a scalar back.  Rows of another task cannot enter a loss,
because it never gets them.

A step may be recorded as a CUDA graph and replayed with other numbers in the same tensors.  So `collate`
gives every tensor a shape that depends on the padded sizes only, and `loss` neither reads a number from the
device nor selects rows by a condition: a missing target is one that cross-entropy ignores (-100).

    Record       plain values by field, as a line of JSON holds them
    Example      the same as token numbers and targets, made once before training
    TaskBatch    examples padded together, on the device
    Prediction   a model's answer to one record
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatout.data.rows.buffers import send
from flatout.engines.adapters.lora.chunked_loss import IGNORED as IGNORED  # a target that is not there
from flatout.engines.adapters.lora.token_blocks import Ints, Padding, Targets, TokenBlock, block_of
from flatout.engines.adapters.tasks.data_rows import DataOptions, Record, Splits, gather, text_field
from flatout.engines.adapters.tasks.decoder import TextDecoder
from flatout.engines.run.row_files import read_rows
from flatout.ground.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One record as numbers; `targets` is empty where the record has nothing to learn from."""

    ids: Ints
    types: Ints | None = None
    targets: Mapping[str, Ints] = field(default_factory=dict)
    index: int  # which record this is
    offsets: Ints | None = None  # [tokens, 2]: the characters of the text behind each token

    @property
    def trainable(self) -> bool:
        return bool(self.targets)

    @property
    def num_targets(self) -> int:
        """How many decisions there are to learn: 1 for a label or a span, the tokens of a text to write."""
        return max((values.size for values in self.targets.values()), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBatch:
    """Examples padded together; row i of the block is example i, further rows are padding.

    The first dimension of a target is the row, so rows of a batch can be picked on the device.  A loss that
    costs much per target lists them instead: `places` are numbers of real targets in `ids` [rows, length],
    counted row by row, and `labels` are those targets.  The host knows the length of such a list without
    asking the device; unused entries are `IGNORED`.
    """

    block: TokenBlock
    targets: dict[str, Tensor]
    count: Tensor  # number of real targets, a float scalar on the device
    examples: tuple[Example, ...]

    @property
    def indices(self) -> list[int]:
        return [example.index for example in self.examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A model's answer to one record: a label, a span of the text, or a text it wrote.

    `text` is None where the words were not asked for (see `AdapterTask.predict`).
    """

    text: str | None
    num_correct: int = 0  # target tokens predicted right, given the ones before (generation)
    num_targets: int = 0


class Asked(NamedTuple):
    """What a task needs to answer: `records[i]` is the record of the example with index i."""

    tokenizer: Any
    records: Sequence[Record]
    write: bool  # whether texts are asked for that `metric` does not need


class AdapterTask(ABC):
    """One task on the encoder's states.

    A subclass defines the first four names below, `generated_row`, `targets_of` (or `encode`), `pad_targets`,
    `head`, `loss`, `answer` and `text_scores`; everything else has a default.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the key of `score` that early stopping and comparisons use
    inputs: ClassVar[tuple[str, ...]]  # fields of a record that the model reads
    answers: ClassVar[tuple[str, ...]]  # fields of a record that the model predicts
    also_named: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # other names that files use for a field
    context: ClassVar[str | None] = None  # the input that `predict` takes beside the text
    needs_decoder: ClassVar[bool] = False
    from_rows: ClassVar[tuple[str, ...]] = ()  # settings of the task that its rows decide: labels

    # Rows

    def record_of(self, row: Mapping[str, Any], *, answered: bool = True) -> Record:
        """Read a line of a user's file; BadInput names the field that is wrong.

        `answered=False` takes a line without its answers, as `predict` is given.
        """
        record = {name: text_field(row, name, *self.also_named.get(name, ())) for name in self.inputs}
        return {**record, **self.answers_of(row, record)} if answered else record

    def answers_of(self, row: Mapping[str, Any], record: Record) -> Record:
        """Read the answers of a line; `record` holds its inputs."""
        return {name: text_field(row, name, *self.also_named.get(name, ())) for name in self.answers}

    @abstractmethod
    def generated_row(self, draw: random.Random) -> Record:
        """Make up a row that can be learned and proves nothing about the world: for tests and first steps."""

    def generated(self, count: int, *, seed: int) -> list[Record]:
        """Make up rows, the same for the same seed."""
        draw = random.Random(f"{self.name} {seed}")
        return [self.generated_row(draw) for _ in range(count)]

    def real(self) -> tuple[list[Record], str] | None:
        """Return rows that a package contains, and where they come from; None if no package has any."""
        return None

    def read(self, path: Path) -> list[Record]:
        """Read the records of a user's file."""
        return read_rows(path, read=self.record_of)

    def input_of(self, record: Record) -> str:
        """Return the input of a record; records with equal inputs count as the same."""
        return "\n".join(str(record[name]) for name in self.inputs)

    def class_of(self, record: Record) -> str | None:
        """Return the class of an answered record; None for a task without classes."""
        return None

    def settings_from(self, splits: Splits) -> dict[str, Any]:
        """Return `from_rows` by name; the run keeps them."""
        return {}

    def describe(self, splits: Splits) -> str | None:
        """Say which settings the rows decided, in one line; None if they decided none."""
        return None

    def group_of(self, record: Record) -> str:
        """Return what must stay in one split when a single file is divided."""
        return self.input_of(record)

    def records(self, options: DataOptions) -> Splits:
        """Return the rows of the train, validation and test splits."""
        return gather(self, options)

    # Numbers

    def encode(self, record: Record, tokenizer: Any, *, max_length: int, index: int = 0) -> Example:
        """Encode one record as token numbers and targets; without its answer it has no targets."""
        ids = tokenizer(record[self.inputs[0]], truncation=True, max_length=max_length)["input_ids"]
        answered = self.answers[0] in record
        targets = self.targets_of(record, tokenizer) if answered else {}
        return Example(ids=np.array(ids, dtype=np.int32), targets=targets, index=index)

    def targets_of(self, record: Record, tokenizer: Any) -> Mapping[str, Ints]:
        """Return the targets of an answered record; a task that overrides `encode` does not need it."""
        raise BadInput(f"{type(self).__name__} has neither targets_of nor encode", hint="give it one of them")

    @abstractmethod
    def pad_targets(self, examples: Sequence[Example], to: Padding) -> Targets:
        """Pad the targets of a batch to arrays of one shape, with `IGNORED` where there is none."""

    def collate(
        self,
        examples: Sequence[Example],
        *,
        adapter: int,
        pad_id: int,
        row_multiple: int = 1,
        length_multiple: int = 1,
        device: torch.device | str = "cpu",
    ) -> TaskBatch:
        """Pad examples into one block with its targets."""
        types = [example.types for example in examples]
        block = block_of(
            [example.ids for example in examples],
            adapter=adapter,
            pad_id=pad_id,
            types=types if any(one is not None for one in types) else None,
            row_multiple=row_multiple,
            length_multiple=length_multiple,
            device=device,
        )
        to = Padding(block.num_rows, block.length, pad_id, row_multiple, length_multiple)
        num_targets = sum(example.num_targets for example in examples)
        return TaskBatch(
            block=block,
            targets={name: send(values, device) for name, values in self.pad_targets(examples, to).items()},
            count=send(np.array(num_targets, dtype=np.float32), device),
            examples=tuple(examples),
        )

    # The model

    @abstractmethod
    def head(self, width: int, *, decoder: TextDecoder | None = None) -> nn.Module:
        """Make the module that the task trains in addition to its adapter; it may use a shared decoder."""

    @abstractmethod
    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        """Return the mean loss of the real targets; 0 if there are none."""

    def predict(
        self,
        head: nn.Module,
        states_BLH: Tensor,
        batch: TaskBatch,
        *,
        tokenizer: Any,
        records: Sequence[Record],
        write: bool = True,
    ) -> list[Prediction]:
        """Predict every example of the batch, in its order; `records` are numbered by `indices`.

        `write=False` skips texts that `metric` does not need: writing takes a pass for every token, and a run
        evaluates often.
        """
        asked = Asked(tokenizer, records, write)
        with at_rest(head, getattr(head, "decoder", head)):
            return self.answer(head, states_BLH, batch, asked)

    @abstractmethod
    def answer(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch, asked: Asked) -> list[Prediction]:
        """Return what `predict` returns, with dropout and gradients off."""

    @abstractmethod
    def text_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        """Score the answers in points up to 100; higher is better."""

    def class_scores(self, said: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
        """Return the points of every class; none for a task without classes."""
        return {}

    def score(self, predictions: Sequence[Prediction], records: Sequence[Record]) -> dict[str, float]:
        """Score in points up to 100; prediction i answers record i, and `metric` is among the scores."""
        return self.text_scores([prediction.text or "" for prediction in predictions], records)


@contextmanager
def at_rest(*modules: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off inside the block; restore each module afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def example_of_pair(
    encoded: Mapping[str, Any], *, index: int, targets: Mapping[str, Ints], offsets: Ints | None = None
) -> Example:
    """Make an example of two texts that a tokenizer encoded together."""
    types = np.array(encoded["token_type_ids"], dtype=np.int32)
    return Example(
        ids=np.array(encoded["input_ids"], dtype=np.int32),
        types=types if types.any() else None,  # RoBERTa's are all 0
        targets=targets,
        index=index,
        offsets=offsets,
    )


def encode_all(
    task: AdapterTask, records: Sequence[Record], tokenizer: Any, *, max_length: int, training: bool
) -> tuple[list[Example], int]:
    """Encode all records; (examples, how many were left out): in training, those with nothing to learn."""
    examples = [
        task.encode(record, tokenizer, max_length=max_length, index=index)
        for index, record in enumerate(records)
    ]
    kept = [example for example in examples if example.trainable or not training]
    return kept, len(examples) - len(kept)
