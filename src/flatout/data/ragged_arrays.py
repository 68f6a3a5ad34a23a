"""Ragged records in flat memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from flatout.data.padding import Pad

Array = npt.NDArray[Any]


class RaggedArrays:
    """Records of ragged and fixed fields; each ragged field is one flat array and a span per record.

    `RaggedArrays({"states": states, "target": targets}, spans={"states": (starts, lengths)})`: a field with
    a span has rows [start, start + length) of its flat array (spans may overlap: windows cut from long
    histories need no copies); a field without one has row i for record i.
    """

    def __init__(
        self, fields: Mapping[str, Any], *, spans: Mapping[str, tuple[Any, Any]] | None = None
    ) -> None:
        raise NotImplementedError

    @classmethod
    def build(cls, records: Iterable[Mapping[str, Any]], path: str | Path) -> RaggedArrays:
        """Write records one by one to `path` (a folder of .npy, or a .safetensors file) and open it.

        A field that has the same number of rows in every record, or is a scalar, becomes a fixed field.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: str | Path) -> RaggedArrays:
        """Map the arrays at `path` into memory; nothing is read before it is used."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        raise NotImplementedError

    @property
    def fields(self) -> dict[str, Array]:
        """The flat arrays."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        raise NotImplementedError

    def lengths(self, field: str | None = None) -> npt.NDArray[np.int64]:
        """Rows of every record in `field`; the only ragged field needs no name."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Array]:
        """One record, as views of the flat arrays."""
        raise NotImplementedError

    def padded(
        self, indices: Any, *, pads: Mapping[str, Pad] | None = None, fields: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Many records at once, ragged fields padded: B L ...."""
        raise NotImplementedError

    def packed(self, indices: Any, *, fields: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Many records at once, end to end without padding, each with its `<field>_offsets` (B + 1)."""
        raise NotImplementedError
