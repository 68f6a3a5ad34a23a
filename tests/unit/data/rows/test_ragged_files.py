from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.data import RaggedArrays
from flatout.data.rows import ragged_files
from flatout.ground.errors import BadInput

RECORDS = [{"x": np.arange(3), "y": 1.5}, {"x": np.arange(1), "y": 2.5}]


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "data.safetensors"
    RaggedArrays.build(RECORDS, path)
    found = numpy_files.load_file(path)
    assert found["fields/x"].tolist() == [0, 1, 2, 0]
    assert found["fields/y"].tolist() == [1.5, 2.5]
    assert found["spans/0.starts"].tolist() == [0, 3] and found["spans/0.lengths"].tolist() == [3, 1]


def test_numpy_reads_what_is_written(tmp_path: Path) -> None:
    RaggedArrays.build(RECORDS, tmp_path / "data")
    assert np.load(tmp_path / "data" / "fields" / "x.npy").tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("name", ["data", "data.safetensors"])
def test_nothing_is_left_beside_the_result(name: str, tmp_path: Path) -> None:
    arrays = RaggedArrays.build(RECORDS, tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    with pytest.raises(BadInput, match="exists"):
        arrays.save(tmp_path / name)
    arrays.save(tmp_path / f"copy-{name}")
    assert RaggedArrays.open(tmp_path / f"copy-{name}")[0]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "there are no records"),
        ([{"x": [1]}, {"y": [1]}], "record 1 (lacks|has) field"),
        ([{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}], "field 'x' of record 1 has shape"),
        (
            [{"x": np.ones(1)}, {"x": np.ones(1, np.int8)}],
            "field 'x' of record 1 has dtype int8, of record 0 float64",
        ),
        ([{"x": "text"}], "field 'x' of record 0 holds"),
        ([{"../x": np.ones(1)}], "cannot be part of a file name"),
    ],
)
def test_a_record_that_does_not_fit_is_named_and_leaves_nothing(
    records: list[Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        RaggedArrays.build(records, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_such_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        RaggedArrays.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no ragged records"):
        RaggedArrays.open(tmp_path / "empty")
    for content in (b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(BadInput, match=r"x\.safetensors"):
            RaggedArrays.open(tmp_path / "x.safetensors")
    path = tmp_path / "cut.safetensors"
    RaggedArrays.build(RECORDS, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadInput, match=r"cut\.safetensors"):
        RaggedArrays.open(path)


@pytest.mark.parametrize("name", ["data", "data.safetensors"])
def test_a_write_that_fails_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = RaggedArrays.build(RECORDS, tmp_path / "whole")

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    monkeypatch.setattr(ragged_files, "_write_rows", full)
    with pytest.raises(OSError, match="No space"):
        arrays.save(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]


def test_empty_fields_survive(tmp_path: Path) -> None:
    nothing = [{"x": np.ones((0, 2), np.float32), "n": 0}, {"x": np.ones((0, 2), np.float32), "n": 1}]
    for name in ("data", "data.safetensors"):
        arrays = RaggedArrays.build(nothing, tmp_path / name)
        assert arrays.padded([1, 0])["x"].shape == (2, 0, 2)
        assert arrays.padded([1, 0])["n"].tolist() == [1, 0]
