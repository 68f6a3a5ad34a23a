"""Which rows a step trains on: a block of similar lengths of every task, the same on every run.

A task's examples are sorted by length and cut into a few buckets of about as many tokens each.  Within a
bucket every batch has one shape: as many rows as the budget of tokens holds at the bucket's longest example,
its target included.  A step takes the same bucket of every task, so the shapes of a whole step are as few as
the buckets, and a step on a GPU can be recorded once per shape and replayed; if each task chose by itself,
five tasks with four buckets would make a thousand shapes.

A bucket is padded once, when it is made, and lies on the device; a batch is a selection of its rows.  Batch
number n is a function of the seed and n alone: resuming needs only the number, and ranks share the batches of
one sequence.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.engines.adapters.lora.encoder import PackedEncoder
from flatout.engines.adapters.lora.token_blocks import TokenBlock
from flatout.engines.adapters.routing.features import LENGTH_MULTIPLE, by_length
from flatout.engines.adapters.tasks.task import IGNORED, AdapterTask, Example, TaskBatch
from flatout.ground.errors import BadInput
from flatout.ground.units import round_up

PLACES_MULTIPLE = 64  # of the places with a target, where shapes shall be few
LISTED = {"places", "labels"}  # targets that list places of `ids` across the rows of a batch
SPREADS = 3.0  # standard deviations that the usual number of places leaves room for
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Examples of similar length, padded together, and how many of them make a batch."""

    whole: TaskBatch
    rows: int
    written: Longs  # target tokens of each example, 0 where nothing is written
    written_on_device: Tensor
    usual_places: int  # room for the targets of nearly every batch
    by_row: bool  # every target is one row per example, or lists places that can be made anew

    def __len__(self) -> int:
        return len(self.whole.examples)


class TaskRows:
    """The training examples of one task."""

    def __init__(
        self,
        task: AdapterTask,
        examples: Sequence[Example],
        *,
        name: str,
        adapter: int,
        tokens: int,
        num_buckets: int,
        pad_id: int,
        seed: int,
        device: torch.device,
    ) -> None:
        if not examples:
            raise BadInput(f"{name} has no example to train on", hint="check its data")
        self._task, self.adapter, self._pad_id, self._device = task, adapter, pad_id, device
        self._seed = [seed, zlib.crc32(name.encode())]
        written = np.array([_num_written(example) for example in examples])
        lengths = np.array([len(example.ids) for example in examples])
        self.buckets = []
        for places in cut_by_length(lengths + written, num_buckets=num_buckets, seed=self._seed):
            length = sum(
                round_up(int(longest[places].max()), LENGTH_MULTIPLE) for longest in (lengths, written)
            )
            if length > tokens:
                raise BadInput(
                    f"tokens={tokens} of {name} hold no row of {length} tokens, its target included",
                    hint="raise tokens, or lower max_length",
                )
            chosen = [examples[place] for place in places]
            self.buckets.append(self._bucket(chosen, written[places], rows=tokens // length))
        self._orders: dict[tuple[int, int], tuple[Longs, Tensor]] = {}

    def batch(self, bucket: int, *, visit: int) -> TaskBatch:
        """Return the batch for the `visit`-th use of a bucket; rows are reshuffled in every round."""
        chosen = self.buckets[bucket]
        on_host, places = self.places(bucket, visit=visit)
        if not chosen.by_row:
            return self._collate([chosen.whole.examples[place] for place in on_host])
        return select_rows(chosen, places, num_places=self._num_places(chosen, on_host))

    def places(self, bucket: int, *, visit: int) -> tuple[Longs, Tensor]:
        """Return the places of that batch's rows in the bucket, as (on the host, on the device)."""
        chosen = self.buckets[bucket]
        first, missing = visit * chosen.rows, chosen.rows
        parts = []
        while missing:
            epoch, offset = divmod(first, len(chosen))
            on_host, on_device = self._order(bucket, epoch)
            parts.append((on_host[offset : offset + missing], on_device[offset : offset + missing]))
            first, missing = first + len(parts[-1][0]), missing - len(parts[-1][0])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part for part, _ in parts]), torch.cat([part for _, part in parts])

    def _bucket(self, examples: list[Example], written: Longs, *, rows: int) -> Bucket:
        whole = self._collate(examples)
        usual = rows * float(written.mean()) + SPREADS * math.sqrt(rows) * float(written.std())
        return Bucket(
            whole=whole,
            rows=rows,
            written=written,
            written_on_device=torch.from_numpy(written).to(self._device),
            usual_places=round_up(math.ceil(usual), PLACES_MULTIPLE),
            by_row=_is_by_row(whole),
        )

    def _collate(self, examples: Sequence[Example]) -> TaskBatch:
        return self._task.collate(
            examples,
            adapter=self.adapter,
            pad_id=self._pad_id,
            length_multiple=LENGTH_MULTIPLE,
            device=self._device,
        )

    def _num_places(self, bucket: Bucket, on_host: Longs) -> int:
        """Return the length of the list of targets: exact on a CPU; on a GPU nearly always the same."""
        needed = int(bucket.written[on_host].sum())
        if self._device.type == "cpu":
            return needed
        return max(bucket.usual_places, round_up(needed, PLACES_MULTIPLE))

    def _order(self, bucket: int, epoch: int) -> tuple[Longs, Tensor]:
        """Return the order of a bucket's rows in its `epoch`-th round."""
        if (bucket, epoch) not in self._orders:
            for old in [key for key in self._orders if key[0] == bucket and key[1] < epoch - 1]:
                del self._orders[old]
            random = np.random.default_rng([*self._seed, bucket, epoch])
            order = random.permutation(len(self.buckets[bucket]))
            self._orders[bucket, epoch] = order, torch.from_numpy(order).to(self._device)
        return self._orders[bucket, epoch]


class TrainingBatches:
    """Batches of all tasks by their number."""

    def __init__(self, rows: Mapping[str, TaskRows], *, seed: int) -> None:
        self.rows = dict(sorted(rows.items(), key=lambda item: item[1].adapter))
        self._seed = seed
        self._num_buckets = max(len(each.buckets) for each in self.rows.values())

    def at(self, number: int, *, tasks: Sequence[str]) -> tuple[TaskBatch, ...]:
        """Return batch `number`: one block of each of `tasks`, in the order of their adapters."""
        return tuple(
            rows.batch(bucket, visit=visit) for rows, bucket, visit in self.where(number, tasks=tasks)
        )

    def where(self, number: int, *, tasks: Sequence[str]) -> list[tuple[TaskRows, int, int]]:
        """Return (rows, bucket, visit) of each task for batch `number`; `visit` counts uses of the bucket.

        A round takes every bucket once, in an order of its own.  A task with fewer buckets than others takes
        turns among its own.
        """
        round_number, place = divmod(number, self._num_buckets)
        order = np.random.default_rng([self._seed, round_number]).permutation(self._num_buckets)
        bucket, found = int(order[place]), []
        for name, rows in self.rows.items():
            if name in tasks:
                turn, own = divmod(bucket, len(rows.buckets))
                visits_per_round = -(-(self._num_buckets - own) // len(rows.buckets))
                found.append((rows, own, round_number * visits_per_round + turn))
        return found


def cut_by_length(lengths: Longs, *, num_buckets: int, seed: list[int]) -> list[Longs]:
    """Cut examples, by place, into at most `num_buckets` groups of similar length and equal tokens.

    Examples of equal length are in random order: in that of a file sorted by class, a bucket and so a batch
    would hold one class alone.
    """
    order = np.lexsort((np.random.default_rng(seed).permutation(len(lengths)), lengths))
    total = np.cumsum(lengths[order])
    which = np.minimum((total - 1) * num_buckets // total[-1], num_buckets - 1)
    groups = (order[which == bucket] for bucket in range(num_buckets))
    return [group for group in groups if len(group)]


def select_rows(bucket: Bucket, places: Tensor, *, num_places: int) -> TaskBatch:
    """Select rows of a bucket, on the device, as a batch of their own without examples."""
    block = bucket.whole.block
    targets = {
        name: values.index_select(0, places)
        for name, values in bucket.whole.targets.items()
        if name not in LISTED
    }
    if "places" in bucket.whole.targets:
        written_B = bucket.written_on_device.index_select(0, places)
        targets |= _list_targets(targets["ids"], written_B, num_places=num_places)
    return TaskBatch(
        block=TokenBlock(
            adapter=block.adapter,
            ids=block.ids.index_select(0, places),
            lengths=block.lengths.index_select(0, places),
            types=None if block.types is None else block.types.index_select(0, places),
        ),
        targets=targets,
        count=num_targets(targets),
        examples=(),
    )


def _list_targets(ids_BT: Tensor, written_B: Tensor, *, num_places: int) -> dict[str, Tensor]:
    """List the places of a [B, T] rectangle that have a target, and those targets.

    The rest of the list is `IGNORED`.  Nothing here asks the device how many targets there are.
    """
    is_target = (torch.arange(ids_BT.shape[1], device=ids_BT.device) < written_B[:, None]).flatten()
    # A target goes to its number in the list, everything else behind the list's end.
    to = torch.where(is_target, is_target.cumsum(0) - 1, num_places)
    every = torch.arange(is_target.numel(), device=ids_BT.device)
    places = every.new_zeros(num_places + 1).scatter_(0, to, every)[:num_places]
    labels = every.new_full((num_places + 1,), IGNORED).scatter_(0, to, ids_BT.flatten())[:num_places]
    return {"places": places, "labels": labels}


def num_targets(targets: Mapping[str, Tensor]) -> Tensor:
    """Count the real targets, as a float scalar; a row has either all of its targets or none."""
    labels = targets.get("labels", next(iter(targets.values())))
    return (labels != IGNORED).sum().to(torch.float32)


def _is_by_row(whole: TaskBatch) -> bool:
    """Return whether rows can be selected from this batch, and their targets counted, as the task would."""
    rows = whole.block.num_rows
    by_row = all(len(values) == rows for name, values in whole.targets.items() if name not in LISTED)
    listed = LISTED & whole.targets.keys()
    whole_list = not listed or (listed == LISTED and "ids" in whole.targets)
    return by_row and whole_list and float(num_targets(whole.targets)) == float(whole.count)


def _num_written(example: Example) -> int:
    """Count the tokens of a target that is a text."""
    return len(example.targets["ids"]) if "ids" in example.targets else 0


def encode_batch(encoder: PackedEncoder, batch: TaskBatch, *, weights_NT: Tensor | None = None) -> Tensor:
    """Return the states [B, L, H] of a batch under its adapter, or under a mixture with its rows' weights."""
    mixture = None if weights_NT is None else weights_NT[batch.indices].to(encoder.device)
    (states_BLH,) = encoder((batch.block,), mixture=mixture)
    return states_BLH


def evaluation_batches(
    task: AdapterTask,
    examples: Sequence[Example],
    *,
    adapter: int,
    tokens: int,
    pad_id: int,
    device: torch.device,
) -> Iterator[TaskBatch]:
    """Yield all examples once, the longest first, at most `tokens` tokens in a batch."""
    for places in by_length(examples, tokens=tokens, spread=0.2):
        yield task.collate(
            [examples[place] for place in places],
            adapter=adapter,
            pad_id=pad_id,
            length_multiple=LENGTH_MULTIPLE,
            device=device,
        )
