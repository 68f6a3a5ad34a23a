"""A batch as a structure: walk it, serve it again, cut it in half.

Scripts change the batches they are given (pop a key, move tensors), so a kept batch is served as a fresh
structure over the same bytes; nothing is copied and pinned memory stays pinned.  If the script changes a
tensor in place, its version counter shows it; batches of such scripts are kept as copies.
"""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 6
LEAST_HALVED = 4  # rows: half of a smaller batch is another kind of batch
SCALARS = (str, bytes, int, float, complex, type(None))
PLAIN = frozenset((*SCALARS, bool))


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or a NumPy array, without importing either."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def map_arrays(
    value: Any,
    function: Callable[[Any], Any],
    sequence: Callable[[Any], Any] | None = None,
    depth: int = 0,
) -> Any:
    """Copy a structure with `function` applied to its arrays; `sequence` may replace a list or tuple."""
    if is_array(value):
        return function(value)
    if depth > MAX_DEPTH or isinstance(value, SCALARS):
        return value

    def again(item: Any) -> Any:
        return map_arrays(item, function, sequence, depth + 1)

    if isinstance(value, collections.abc.MutableMapping):
        mapping = copy.copy(value)
        for key in list(value):
            mapping[key] = again(value[key])
        return mapping
    if isinstance(value, (list, tuple)):
        replaced = sequence(value) if sequence is not None else None
        if replaced is not None:
            return replaced
        if PLAIN.issuperset(map(type, value)):  # thousands of tokens, say: no arrays among them
            return value if type(value) is tuple else copy.copy(value)
        items = [again(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _map_attributes(value, again)


def _map_attributes(value: Any, again: Callable[[Any], Any]) -> Any:
    """Copy a batch object (a dataclass, or tensors in its __dict__) field by field."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(record, field.name, again(getattr(value, field.name)))
        return record
    attributes = getattr(value, "__dict__", None)
    if not attributes or not any(is_array(item) for item in attributes.values()):
        return value
    thing = copy.copy(value)
    for name, item in attributes.items():
        if not isinstance(item, SCALARS):
            thing.__dict__[name] = again(item)
    return thing


def arrays_of(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(array: Any) -> Any:
        found.append(array)
        return array

    map_arrays(value, note)
    return found


def num_rows(batch: Any, hint: int | None = None) -> int | None:
    """Return the batch size: `hint` if an array or a list has it, else the commonest leading dimension."""
    leading: list[int] = []
    lengths: list[int] = []

    def note(array: Any) -> None:
        if len(array.shape) > 0:
            leading.append(array.shape[0])

    map_arrays(batch, note, lambda items: lengths.append(len(items)))
    if not leading:
        return None
    if hint in leading or hint in lengths:
        return hint
    return int(Counter(leading).most_common(1)[0][0])


def num_bytes(batch: Any) -> int:
    return sum(bytes_of(array) for array in arrays_of(batch))


def bytes_of(array: Any) -> int:
    """Return the bytes of an array or tensor; for a sparse tensor, the bytes of its values."""
    try:
        return int(array.nbytes)
    except RuntimeError:
        return int(array._nnz() * array.element_size())


def halve(batch: Any, hint: int | None = None) -> Any | None:
    """Return the first half of the rows; None if no array has rows or too few remain."""
    rows = num_rows(batch, hint)
    if rows is None or rows < LEAST_HALVED:
        return None
    half = rows // 2

    def cut(array: Any) -> Any:
        return array[:half] if len(array.shape) > 0 and array.shape[0] == rows else array

    def cut_sequence(items: Any) -> Any | None:
        # one entry per sample (strings, lengths, detection targets), not a pair like (inputs, labels)
        if len(items) != rows or hasattr(items, "_fields"):
            return None
        if any(
            len(array.shape) > 0 and array.shape[0] == rows for item in items for array in arrays_of(item)
        ):
            return None
        return type(items)(items[:half])

    return map_arrays(batch, cut, cut_sequence)


class KeptBatch:
    """A batch that the script was given, kept to be served again."""

    __slots__ = ("_arrays", "_copies", "batch", "rows", "versions")

    def __init__(self, batch: Any, *, rows: int | None = None, copies: bool = False) -> None:
        self.rows = rows
        self._copies = copies  # for scripts that change their batches in place
        self.batch = map_arrays(batch, copy_array if copies else aside)
        self._arrays = arrays_of(self.batch)
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version_of(array) for array in self._arrays]

    @property
    def changed(self) -> bool:
        """Return whether the script changed one of its tensors in place."""
        return not self._copies and self._versions() != self.versions

    def serve(self) -> Any | None:
        """Return a fresh structure over the kept arrays; None if the script changed one of them in place."""
        if self.changed:
            return None
        return map_arrays(self.batch, copy_array if self._copies else aside)


def aside(array: Any) -> Any:
    """Return the same values behind another handle, so that `requires_grad_()` stays with the script.

    A tensor shares its bytes and its version counter with the handle; anything without a counter is copied.
    """
    if not _is_tensor(array) or array.is_inference():
        return copy_array(array)
    return array.detach().requires_grad_(array.requires_grad)


def copy_array(array: Any) -> Any:
    """Copy an array into its own memory, page-locked if the original was."""
    if not _is_tensor(array):
        return copy.copy(array)
    values = array.detach()
    twin = values.clone()
    return twin.pin_memory() if values.is_pinned() else twin


def version_of(array: Any) -> int:
    """Return a number that changes with each change in place; 0 for what has no such counter."""
    return array._version if _is_tensor(array) and not array.is_inference() else 0


def _is_tensor(array: Any) -> bool:
    """Return whether an array is a tensor of torch; a lazy kernel matrix has `detach` as well."""
    return hasattr(array, "detach") and hasattr(array, "is_inference")


def is_computed(value: Any) -> bool:
    """Return whether gradients flow into an object that is not a tensor: its graph lasts for one step."""
    return any(getattr(array, "requires_grad", False) and not _is_tensor(array) for array in arrays_of(value))
