"""Ragged records in flat arrays that are mapped into memory, not read.

A million records as a million objects cost a million allocations, and again in every worker.  As one flat
array per field and a span per record they cost nothing to open, are shared by all processes through the
page cache, and a batch of them is one gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.rows import ragged_files
from flatout.data.rows.buffers import Buffers
from flatout.data.rows.padding import Array, Longs, Pad
from flatout.data.rows.row_gather import DeviceRows, HostRows, Span
from flatout.ground.errors import BadInput


class RaggedArrays:
    """Records of ragged and fixed fields; each ragged field is one flat array and a span per record.

    `RaggedArrays({"states": states, "target": targets}, spans={"states": (starts, lengths)})`: a field with
    a span has the rows from start to start + length of its flat array (spans may overlap, so windows cut
    from long histories need no copies); a field without one has row i for record i.
    """

    def __init__(
        self, fields: Mapping[str, Any], *, spans: Mapping[str, tuple[Any, Any]] | None = None
    ) -> None:
        self._fields = {name: _as_array(name, values) for name, values in fields.items()}
        if not self._fields:
            raise BadInput("records need at least one field")
        shared: dict[tuple[int, int], Span] = {}
        self._spans: dict[str, Span] = {}
        for name, (starts, lengths) in (spans or {}).items():
            if name not in self._fields:
                raise BadInput(
                    f"there is a span but no field {name!r}", hint=f"fields: {sorted(self._fields)}"
                )
            key = (id(starts), id(lengths))
            if key not in shared:
                shared[key] = Span(_as_longs(starts), _as_longs(lengths))
            self._spans[name] = shared[key]
        self._num_records = self._count()
        self._rows = HostRows(self._fields, self._spans)

    def _count(self) -> int:
        """Count the records, the same in every field; spans must lie within their arrays."""
        counts = {
            name: len(self._spans[name].starts) if name in self._spans else len(flat)
            for name, flat in self._fields.items()
        }
        if len(set(counts.values())) > 1:
            raise BadInput(f"fields differ in their number of records: {counts}")
        for name, span in self._spans.items():
            flat = self._fields[name]
            if len(span.lengths) != len(span.starts):
                raise BadInput(f"field {name!r}: {len(span.starts)} starts and {len(span.lengths)} lengths")
            outside = (span.starts < 0) | (span.lengths < 0) | (span.starts + span.lengths > len(flat))
            if outside.any():
                i = int(outside.argmax())
                raise BadInput(
                    f"field {name!r} of record {i}: {span.lengths[i]} rows from row {span.starts[i]},"
                    f" the array has {len(flat)}"
                )
        return next(iter(counts.values()))

    @classmethod
    def build(
        cls, records: Iterable[Mapping[str, Any]], path: str | Path, *, ragged: Sequence[str] = ()
    ) -> RaggedArrays:
        """Write records one by one to `path` (a folder of .npy, or a .safetensors file) and open it.

        A field of the same shape in every record becomes a fixed field, unless `ragged` names it.
        """
        ragged_files.build(records, Path(path), ragged=ragged, make=cls)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> RaggedArrays:
        """Map the arrays at `path` into memory; nothing is read before it is used."""
        fields, spans = ragged_files.read(Path(path))
        return cls(fields, spans=spans)

    def save(self, path: str | Path) -> None:
        """Write to a folder of .npy files, or to one file if the path ends in .safetensors."""
        ragged_files.write(self._fields, self._spans, Path(path))

    @property
    def fields(self) -> dict[str, Array]:
        """The flat arrays."""
        return dict(self._fields)

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat arrays and the spans."""
        spans = {id(span): span.starts.nbytes + span.lengths.nbytes for span in self._spans.values()}
        return sum(flat.nbytes for flat in self._fields.values()) + sum(spans.values())

    def lengths(self, field: str | None = None) -> Longs:
        """Return the rows of every record in `field`; the only ragged field needs no name."""
        if field is None:
            if len({id(span) for span in self._spans.values()}) != 1:
                raise BadInput("name the field", hint=f"ragged fields: {sorted(self._spans)}")
            field = next(iter(self._spans))
        if field not in self._spans:
            raise BadInput(f"no ragged field {field!r}", hint=f"ragged fields: {sorted(self._spans)}")
        return self._spans[field].lengths

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> dict[str, Array]:
        """Return one record, as views of the flat arrays."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no record {index}; there are {len(self)}")
        record = {}
        for name, flat in self._fields.items():
            span = self._spans.get(name)
            if span is None:
                record[name] = flat[index]
            else:
                record[name] = flat[span.starts[index] : span.starts[index] + span.lengths[index]]
        return record

    def padded(
        self, indices: Any, *, pads: Mapping[str, Pad] | None = None, fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return many records at once, ragged fields padded: B L ....; `pads` as for `PadCollate`."""
        pads = pads or {}
        chosen = self.check_numbers(indices)
        self.check_pads(chosen, pads)
        return self._rows.padded(chosen, self.check_names(fields), pads)

    def packed(self, indices: Any, *, fields: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return many records end to end without padding, each with its `<field>_offsets` (B + 1)."""
        return self._rows.packed(self.check_numbers(indices), self.check_names(fields))

    def rows_on(self, device: torch.device | None, *, pinned: bool = False) -> HostRows | DeviceRows:
        """Return a gatherer that reads arrays copied to `device`, or the mapped arrays."""
        if device is not None:
            return DeviceRows(self._fields, self._spans, device)
        return HostRows(self._fields, self._spans, buffers=Buffers(pinned=pinned, reuse=None))

    def check_numbers(self, indices: Any) -> Longs:
        """Return record numbers as an array; negative ones count from the end."""
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or chosen.size and chosen.dtype.kind not in "iu":
            raise BadInput(f"records are chosen by whole numbers, not {chosen.dtype} of shape {chosen.shape}")
        chosen = chosen.astype(np.int64)
        outside = (chosen < -len(self)) | (chosen >= len(self))
        if outside.any():
            raise BadInput(f"there is no record {chosen[outside.argmax()]}; there are {len(self)}")
        return np.where(chosen < 0, chosen + len(self), chosen) if (chosen < 0).any() else chosen

    def check_names(self, fields: Sequence[str] | None) -> list[str]:
        names = list(self._fields) if fields is None else list(fields)
        for name in names:
            if name not in self._fields:
                raise BadInput(f"no field {name!r}", hint=f"fields: {sorted(self._fields)}")
        return names

    def check_pads(self, indices: Longs, pads: Mapping[str, Pad]) -> None:
        """Raise BadInput where a record is longer than its `max_length` and may not be cut."""
        for name, pad in pads.items():
            if name not in self._spans:
                raise BadInput(
                    f"no ragged field {name!r} to pad", hint=f"ragged fields: {sorted(self._spans)}"
                )
            lengths = self._spans[name].lengths
            if (
                pad.max_length is None
                or pad.truncate
                or not (over := lengths[indices] > pad.max_length).any()
            ):
                continue
            record = indices[over.argmax()]
            raise BadInput(
                f"field {name!r} of record {record} has {lengths[record]} rows,"
                f" max_length is {pad.max_length}",
                hint="cut it with Pad(truncate=True)",
            )


def _as_array(name: str, values: Any) -> Array:
    array: Array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim == 0:
        raise BadInput(f"field {name!r} is a single number")
    if array.dtype.kind not in "biufc":
        raise BadInput(f"field {name!r} holds {array.dtype}, which is not a number")
    return array


def _as_longs(values: Any) -> npt.NDArray[np.int64]:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return array.astype(np.int64, copy=False)
