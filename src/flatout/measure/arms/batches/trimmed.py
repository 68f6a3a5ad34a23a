"""Steps on batches without needless padding.

Rows of different length are padded to a common length.  Padding that all rows of a batch share can be cut off
("trimmed").  Batching samples of similar length saves more ("similar lengths"): the rows of the kept batches
are sorted by length and cut into batches of the same sizes.  A real sampler sorts far more rows than were
kept, so its batches are more uniform: each kept row stands for several rows of its length.

A row ends where its last run of the padding value begins, plus one position, because the padding value may
also end a sentence.  Integer arrays with two dimensions count as sequences; other arrays count only if
samples of different length were seen before they were collated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.batches.served_batches import ServedBatches
from flatout.measure.batches import arrays_of, map_arrays, num_rows
from flatout.measure.evidence import Place
from flatout.measure.loading.loaders import LoaderWatch

LEAST_SAVED = 0.1  # of all positions
LEAST_WIDTH = 8  # positions: narrower arrays are features
MOST_ALIKE = 16  # rows of one length that one kept row represents
LABELS = {"longest": "trimmed", "similar": "trimmed, similar lengths"}

Cut = tuple[Any, int]  # a batch, and its positions: rows times width


class Trimmed(Arm):
    """Kept batches served with less padding."""

    kind = "trimmed"
    baseline = serves = "cached"

    def __init__(
        self,
        loaders: LoaderWatch,
        *,
        to: str,
        ragged: bool,
        alike: int = 1,
        suspicion: float,
        place: Place | None = None,
    ) -> None:
        self.label, self.to, self._alike = LABELS[to], to, alike
        self.suspicion, self.place = suspicion, place
        self._served = ServedBatches(loaders)
        self._ragged = ragged

    def begin(self) -> None:
        batches = self._served.begin()
        if not batches:
            self.refusal = "no batch was kept"
            return
        try:
            padded = [PaddedBatch(batch, ragged=self._ragged) for batch in batches]
            changed = CHANGES[self.to](padded, self._alike)
        except NotPadded as reason:
            self.refusal = str(reason)
        else:
            self._served.replace(batch for batch, _positions in changed)

    def end(self) -> None:
        self._served.end()


class NotPadded(Exception):
    """Says why a batch cannot be cut."""


class PaddedBatch:
    """A batch whose rows are padded to a common length."""

    def __init__(self, batch: Any, *, ragged: bool) -> None:
        import torch

        self.batch, self.arrays = batch, arrays_of(batch)
        rows = num_rows(batch)
        if rows is None or not all(isinstance(array, torch.Tensor) for array in self.arrays):
            raise NotPadded("the batches hold more than tensors with one row per sample")
        if _has_lists(batch, rows):  # most likely lengths, which would not match other or shorter rows
            raise NotPadded("the batches hold a list with an entry for each sample")
        self.rows = rows
        sequences = [array for array in self.arrays if _is_sequence(array, rows, ragged=ragged)]
        widths = Counter(int(array.shape[1]) for array in sequences)
        if not widths:
            raise NotPadded("the batches hold no padded sequences")
        self.width = widths.most_common(1)[0][0]
        ends = [_ends(array) for array in sequences if array.shape[1] == self.width]
        padded = [each + 1 for each in ends if int(each.min()) < self.width - 1]
        full = torch.full((rows,), self.width)
        self.ends = torch.stack(padded).amax(0).minimum(full) if padded else full

    def has_rows(self, position: int) -> bool:
        array = self.arrays[position]
        return array.dim() > 0 and int(array.shape[0]) == self.rows

    def axes(self, position: int) -> tuple[int, ...]:
        """Return the dimensions of an array that run along the sequence."""
        array = self.arrays[position]
        most = min(2, array.dim()) if array.is_floating_point() else array.dim()  # features may be as many
        return tuple(
            axis for axis in range(1, most) if self.has_rows(position) and array.shape[axis] == self.width
        )

    def widened(self, position: int, width: int) -> Any:
        """Pad an array to the width of batches of `width`."""
        array = self.arrays[position]
        for axis in self.axes(position):
            filling = array.narrow(axis, self.width - 1, 1)
            array = _joined([array, filling.expand(_with(array.shape, axis, width - self.width))], axis)
        return array

    def around(self, arrays: list[Any], *, width: int) -> Any:
        """Rebuild the batch's structure around other arrays, cut to `width` along the sequence."""
        remaining = iter(range(len(arrays)))

        def take(_array: Any) -> Any:
            position = next(remaining)
            array = arrays[position]
            for axis in self.axes(position):
                array = array.narrow(axis, 0, width)
            array = array.contiguous()
            return array.pin_memory() if self.arrays[position].is_pinned() else array

        return map_arrays(self.batch, take)


def trim(batches: list[PaddedBatch], _alike: int = 1) -> list[Cut]:
    """Cut each batch to its longest row."""
    widths = [int(batch.ends.max()) for batch in batches]
    if all(width == batch.width for batch, width in zip(batches, widths, strict=True)):
        raise NotPadded("every batch has a row that fills it, so nothing can be cut off")
    return [
        (batch.around(batch.arrays, width=width), batch.rows * width)
        for batch, width in zip(batches, widths, strict=True)
    ]


def sort_by_length(batches: list[PaddedBatch], alike: int = 1) -> list[Cut]:
    """Batch all rows by similar length; each row stands for `alike` rows of its length."""
    import torch

    first = batches[0]
    if any(len(batch.arrays) != len(first.arrays) for batch in batches):
        raise NotPadded("the batches are built differently")
    ends = torch.cat([batch.ends for batch in batches])
    if int(ends.min()) == int(ends.max()):
        raise NotPadded("all rows are equally long")
    widest = max(batch.width for batch in batches)
    pools = [
        _joined([batch.widened(position, widest) for batch in batches], 0)
        if all(batch.has_rows(position) for batch in batches)
        else None
        for position in range(len(first.arrays))
    ]
    order = torch.argsort(ends).repeat_interleave(alike)
    chosen = [order[start : start + rows] for start, rows in _spread([b.rows for b in batches], len(order))]
    widths = [int(ends[rows].max()) for rows in chosen]
    cuts = []
    for turn in take_turns(widths):
        arrays = [
            array if pool is None else pool[chosen[turn]]
            for array, pool in zip(first.arrays, pools, strict=True)
        ]
        cuts.append((first.around(arrays, width=widths[turn]), len(chosen[turn]) * widths[turn]))
    return cuts


def _spread(sizes: list[int], length: int) -> Iterable[tuple[int, int]]:
    """Yield (start, size) of pieces whose middles are spread evenly over `length` rows."""
    for number, size in enumerate(sizes):
        middle = (2 * number + 1) * length // (2 * len(sizes))
        yield max(0, min(middle - size // 2, length - size)), size


def take_turns(widths: list[int]) -> list[int]:
    """Order batches so that any few in a row average the mean width; the last choice runs first, untimed."""
    mean = sum(widths) / len(widths)
    left, taken = list(range(len(widths))), list[int]()
    while left:
        so_far = sum(widths[turn] for turn in taken)
        nearest = min(left, key=lambda turn: abs((so_far + widths[turn]) / (len(taken) + 1) - mean))
        taken.append(nearest)
        left.remove(nearest)
    return taken[-1:] + taken[:-1]


CHANGES: dict[str, Callable[[list[PaddedBatch], int], list[Cut]]] = {
    "longest": trim,
    "similar": sort_by_length,
}


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms if the kept batches hold padding; the model may save the same share of its time."""
    record = context.loaders.trained_on()
    if record is None or not record.kept:
        return
    ragged = bool(record.lengths)
    alike = max(1, min(MOST_ALIKE, (record.config["num_batches"] or 0) // len(record.kept)))
    model_s = sum(context.phases_s.get(phase, 0.0) for phase in ("forward", "backward"))
    for to, change in CHANGES.items():
        try:
            padded = [PaddedBatch(each.batch, ragged=ragged) for each in record.kept]
            changed = change(padded, alike)
        except NotPadded:
            continue
        saved = 1 - sum(num for _batch, num in changed) / sum(batch.rows * batch.width for batch in padded)
        if saved >= LEAST_SAVED:
            suspicion = min(1.0, saved * model_s / context.step_s)
            yield Trimmed(
                context.loaders,
                to=to,
                ragged=ragged,
                alike=alike,
                suspicion=suspicion,
                place=record.place,
            )


def _has_lists(batch: Any, rows: int) -> bool:
    """Return whether a batch holds a list of plain values with one entry per row."""
    if isinstance(batch, dict):
        return any(_has_lists(value, rows) for value in batch.values())
    if not isinstance(batch, (list, tuple)):
        return False
    plain = len(batch) == rows and all(isinstance(value, (int, float, str)) for value in batch)
    return plain or any(_has_lists(value, rows) for value in batch)


def _is_sequence(array: Any, rows: int, *, ragged: bool) -> bool:
    if array.dim() < 2 or array.shape[0] != rows or array.shape[1] < LEAST_WIDTH:
        return False
    return ragged or (array.dim() == 2 and not array.is_floating_point())


def _ends(array: Any) -> Any:
    """Return where the last run of the padding value begins in each row."""
    last = array[:, -1].reshape(array.shape[0], -1)[:, 0]
    padding = last.mode().values
    same = (array == padding).reshape(*array.shape[:2], -1).all(-1)
    return array.shape[1] - same.flip(1).long().cumprod(1).sum(1)


def _joined(arrays: list[Any], axis: int) -> Any:
    import torch

    return torch.cat(arrays, axis)


def _with(shape: Any, axis: int, size: int) -> list[int]:
    return [size if each == axis else int(length) for each, length in enumerate(shape)]
