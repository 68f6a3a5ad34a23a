"""What a task is: its rows, how they become tokens and targets, its head, its loss and its scores.

A task is one file in this folder with one subclass of `Task`; `tasks.known_tasks` finds it there, so adding
a task is adding a file.  The encoder, its adapters, the batches and the optimizer know nothing of any task:
they see a `Block` of token numbers, hand the task the encoder's states of exactly its own rows, and get a
scalar back.  Rows of another task cannot enter a loss because they are never given to it.

A step may be recorded as a CUDA graph and played again with other numbers in the same tensors, so `collate`
gives every tensor a shape that depends on the padded sizes only, and `loss` neither asks the device for a
number nor picks rows by a condition: what is missing is a target that cross-entropy ignores (-100).

    Record       plain values by field, as a line of JSON holds them
    Example      the same as token numbers and targets, made once before training
    TaskBatch    examples padded together, on the device
    Prediction   what a model says to one record
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flatout.engines.adapters.lora.blocks import Block, block_of
from flatout.engines.adapters.lora.chunked_loss import IGNORED as IGNORED  # a target that is not there
from flatout.engines.adapters.tasks.decoder import Decoder
from flatout.engines.adapters.tasks.rows import read_rows
from flatout.engines.run.settings import check_names
from flatout.errors import BadInput

Record = dict[str, Any]
Ints = npt.NDArray[np.int32]
Source = Literal["auto", "generated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Where the rows of a task come from, and how many of them.

    `path` is a JSONL file (divided into splits by the hash of each row's input), a folder with train.jsonl,
    validation.jsonl and test.jsonl, or what else the task reads; `validation` and `test` name files of their
    own.  Without `path`, "auto" takes real rows that a package carries, where there is one for this task.
    """

    path: Path | None = None
    validation: Path | None = None
    test: Path | None = None
    source: Source = "auto"
    num_train: int | None = None  # None: all there are
    num_validation: int | None = None
    num_test: int | None = None
    seed: int = 0  # of generated rows

    @classmethod
    def of(cls, given: Mapping[str, Any], *, task: str) -> DataOptions:
        """Options as a settings file gives them; BadInput names the key or the value that is wrong."""
        check_names(given, names=[option.name for option in fields(cls)], verb="data", source=task)
        values: dict[str, Any] = dict(given)
        for name in ("path", "validation", "test"):
            if (given_path := values.get(name)) is not None:
                if not isinstance(given_path, (str, Path)):
                    raise BadInput(f"{task}: {name}={given_path!r} is no path", hint="give a file or folder")
                values[name] = Path(given_path).expanduser()
        options = cls(**values)
        if options.source not in get_args(Source):
            raise BadInput(f"{task}: source={options.source!r}", hint=f"known: {', '.join(get_args(Source))}")
        for name in ("num_train", "num_validation", "num_test"):
            count = getattr(options, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise BadInput(f"{task}: {name}={count!r} is no number of rows", hint="give 1 or more")
        if options.path is None and (options.validation or options.test):
            raise BadInput(f"{task}: validation and test need a path to train on", hint="give path, too")
        return options


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The rows of a task, no input in two splits, and one line that says where they come from."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]
    origin: str


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
    counted row by row, and `labels` are those targets.  The host knows how long such a list must be without
    asking the device; what is left of it is `IGNORED`.
    """

    block: Block
    targets: dict[str, Tensor]
    count: Tensor  # number of real targets, a float scalar on the device
    examples: tuple[Example, ...]

    @property
    def indices(self) -> list[int]:
        return [example.index for example in self.examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model says to one record: a label, a span of the text, or a text it wrote.

    `text` is None where the words were not asked for (see `Task.predict`).
    """

    text: str | None
    num_correct: int = 0  # target tokens named rightly when the ones before are given (generation)
    num_targets: int = 0


class Task(ABC):
    """One task on the encoder's states."""

    name: ClassVar[str]
    metric: ClassVar[str]  # the key of `score` that early stopping and comparisons use
    inputs: ClassVar[tuple[str, ...]]  # fields of a record that are asked
    answers: ClassVar[tuple[str, ...]]  # fields of a record that are to be found
    needs_decoder: ClassVar[bool] = False

    # Rows

    @abstractmethod
    def record_of(self, row: Mapping[str, Any], *, answered: bool = True) -> Record:
        """A line of a user's file as a record; BadInput names the field that is wrong.

        `answered=False` takes a line without its answers, as `predict` is given.
        """

    @abstractmethod
    def generated(self, count: int, *, seed: int) -> list[Record]:
        """Rows that can be learned and prove nothing about the world: for tests and first steps."""

    def real(self) -> tuple[list[Record], str] | None:
        """Rows that a package carries, and where they are from; None where none is known."""
        return None

    def read(self, path: Path) -> list[Record]:
        """The records of a user's file."""
        return read_rows(path, read=self.record_of)

    def input_of(self, record: Record) -> str:
        """What is asked: records that ask the same are the same."""
        return "\n".join(str(record[name]) for name in self.inputs)

    def group_of(self, record: Record) -> str:
        """What must stay in one split when a single file is divided."""
        return self.input_of(record)

    def records(self, options: DataOptions) -> Splits:
        """The rows to train on, to stop by and to report."""
        from flatout.engines.adapters.tasks.gathering import gather

        return gather(self, options)

    # Numbers

    @abstractmethod
    def encode(self, record: Record, tokenizer: Any, *, max_length: int, index: int = 0) -> Example:
        """Token numbers and targets of one record; without its answer, an example without targets."""

    @abstractmethod
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
        """Examples as one block with its targets."""

    # The model

    @abstractmethod
    def head(self, width: int, *, decoder: Decoder | None = None) -> nn.Module:
        """What the task trains beside its adapter.  A shared decoder is used, but not part of the head."""

    @abstractmethod
    def loss(self, head: nn.Module, states_BLH: Tensor, batch: TaskBatch) -> Tensor:
        """The mean loss of the real targets; 0 where there are none."""

    @abstractmethod
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
        """One prediction per example of the batch, in its order; `records` are numbered by `indices`.

        `write=False` leaves out texts that `metric` does not need: writing takes a pass for every token,
        and a run asks often how far it is.
        """

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], records: Sequence[Record]) -> dict[str, float]:
        """Scores in points from 0 to 100, higher is better; prediction i answers record i.

        `metric` is always among them; scores of texts only where the texts were written.
        """


@contextmanager
def at_rest(*modules: nn.Module) -> Iterator[None]:
    """No dropout and no gradient inside; each module goes on as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def block_and_count(
    examples: Sequence[Example],
    *,
    num_targets: int,
    adapter: int,
    pad_id: int,
    row_multiple: int,
    length_multiple: int,
    device: torch.device | str,
) -> tuple[Block, Tensor]:
    """What every collate begins with."""
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
    return block, tensor_on(np.array(num_targets, dtype=np.float32), device)


def tensor_on(values: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """An array on a device; the copy to a GPU does not hold up the host."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def encode_all(
    task: Task, records: Sequence[Record], tokenizer: Any, *, max_length: int, training: bool
) -> tuple[list[Example], int]:
    """All examples, and how many were left out: in training, those with nothing left to learn."""
    examples = [
        task.encode(record, tokenizer, max_length=max_length, index=index)
        for index, record in enumerate(records)
    ]
    kept = [example for example in examples if example.trainable or not training]
    return kept, len(examples) - len(kept)
