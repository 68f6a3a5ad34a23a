from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from flatout.data import Pad, PadCollate, RaggedArrays
from flatout.ground.errors import BadInput


def records(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": np.arange(length, dtype=np.int32) + 10 * number,
            "features": torch.full((length, 2), float(number)),
            "labels": np.full(number % 3, number, dtype=np.int8),
            "image": np.full((2, 3), number, dtype=np.uint8),
            "weight": 0.5 * number,
        }
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", ["data", "data.safetensors"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), chosen=st.data())
def test_built_records_come_back_one_by_one_and_together(
    name: str, lengths: list[int], chosen: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given_records = records(lengths)
    arrays = RaggedArrays.build(given_records, tmp_path_factory.mktemp("ragged") / name)
    assert len(arrays) == len(lengths)
    for number, record in enumerate(given_records):
        found = arrays[number]
        assert found.keys() == record.keys()
        assert all(np.array_equal(found[field], np.asarray(record[field])) for field in record)
    indices = chosen.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
    pads = {"tokens": Pad(value=-1, lengths="n", multiple=2)} if len(set(lengths)) > 1 else {}
    batch = arrays.padded(indices, pads=pads)
    expected = PadCollate(pads)([arrays[index] for index in indices])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[field], expected[field]) for field in expected)


def test_fields_of_equal_lengths_share_their_span(tmp_path: Path) -> None:
    arrays = RaggedArrays.build(records([1, 4, 2]), tmp_path / "data")
    spans = list((tmp_path / "data" / "spans").iterdir())
    assert len(spans) == 4  # tokens and features share one, labels have theirs
    assert arrays.lengths("tokens").tolist() == arrays.lengths("features").tolist() == [1, 4, 2]
    with pytest.raises(BadInput, match="name the field"):
        arrays.lengths()
    with pytest.raises(BadInput, match="no ragged field 'image'"):
        arrays.lengths("image")


def test_opening_reads_nothing_and_writing_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.safetensors"
    arrays = RaggedArrays.build(records([1, 4, 2]), path)
    tokens = arrays.fields["tokens"]
    assert isinstance(tokens.base, np.memmap)
    before = path.read_bytes()
    tokens[:] = 0
    assert path.read_bytes() == before
    assert RaggedArrays.open(path)[1]["tokens"].tolist() == [10, 11, 12, 13]


def test_windows_may_overlap() -> None:
    history = np.arange(10)
    windows = RaggedArrays({"x": history, "y": np.arange(3)}, spans={"x": ([0, 2, 4], [4, 4, 6])})
    assert windows.padded([0, 1])["x"].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert windows.lengths().tolist() == [4, 4, 6]
    assert windows[-1]["x"].tolist() == [4, 5, 6, 7, 8, 9]
    assert windows.num_bytes == history.nbytes + 3 * 8 + 6 * 8


def test_as_the_dataset_of_a_loader() -> None:
    arrays = RaggedArrays({"x": np.arange(6)}, spans={"x": ([0, 1, 3], [1, 2, 3])})
    loader: Any = DataLoader(arrays, batch_size=3, collate_fn=PadCollate())  # type: ignore[arg-type]
    (batch,) = list(loader)
    assert torch.equal(batch["x"], arrays.padded([0, 1, 2])["x"])


def test_a_ragged_field_stays_one_if_named(tmp_path: Path) -> None:
    same = [{"x": np.arange(2)}, {"x": np.arange(2)}]
    assert RaggedArrays.build(same, tmp_path / "fixed").packed([0, 1])["x"].tolist() == [[0, 1], [0, 1]]
    packed = RaggedArrays.build(same, tmp_path / "ragged", ragged=["x"]).packed([0, 1])
    assert packed["x"].tolist() == [0, 1, 0, 1] and packed["x_offsets"].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedArrays({}), "at least one field"),
        (lambda: RaggedArrays({"x": 3}), "field 'x' is a single number"),
        (lambda: RaggedArrays({"x": ["a"]}), "field 'x' holds"),
        (lambda: RaggedArrays({"x": [1], "y": [1, 2]}), "differ in their number of records"),
        (lambda: RaggedArrays({"x": [1]}, spans={"y": ([0], [1])}), "a span but no field 'y'"),
        (lambda: RaggedArrays({"x": [1]}, spans={"x": ([0, 0], [1])}), "2 starts and 1 lengths"),
        (lambda: RaggedArrays({"x": [1, 2]}, spans={"x": ([0, 1], [1, 2])}), "record 1: 2 rows from row 1"),
        (lambda: RaggedArrays({"x": [1, 2]}).padded([2]), "there is no record 2; there are 2"),
        (lambda: RaggedArrays({"x": [1, 2]}).padded([0.5]), "whole numbers"),
        (lambda: RaggedArrays({"x": [1, 2]}).padded([0], fields=["y"]), "no field 'y'"),
        (lambda: RaggedArrays({"x": [1, 2]}).padded([0], pads={"x": Pad()}), "no ragged field 'x' to pad"),
        (
            lambda: RaggedArrays({"x": [1, 2]}, spans={"x": ([0, 0], [1, 2])}).padded(
                [0, 1], pads={"x": Pad(max_length=1)}
            ),
            "field 'x' of record 1 has 2 rows, max_length is 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()
    with pytest.raises(IndexError, match="there is no record 2"):
        RaggedArrays({"x": [1, 2]})[2]
