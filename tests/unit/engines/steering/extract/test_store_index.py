"""The folder is the index: shards appear, vanish, and are read once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flatout.engines.steering.extract import store_index
from flatout.engines.steering.extract.store_index import FORMAT, NOWHERE, VERSION, ShardIndex, read_shard

KEYS = [bytes([number]) * 32 for number in range(4)]


def write(path: Path, *, keys: list[bytes], layers: tuple[int, ...] = (0,), **metadata: str) -> Path:
    tensors = {f"layer.{layer}": torch.zeros(len(keys), 2) for layer in layers}
    tensors["keys"] = torch.tensor([list(key) for key in keys], dtype=torch.uint8)
    save_file(tensors, path, {"format": FORMAT, "version": VERSION, "space": "s", **metadata})
    return path


def test_a_shard_says_what_it_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", keys=KEYS[:2], layers=(3, 12))
    shard = read_shard(path)
    assert shard is not None
    assert (shard.space, shard.layers, shard.rows) == ("s", {3, 12}, {KEYS[0]: 0, KEYS[1]: 1})
    assert shard.num_bytes == path.stat().st_size


def test_files_of_other_formats_and_versions_are_none(tmp_path: Path) -> None:
    for name, metadata in (("a", {"version": "2"}), ("b", {"format": "other"})):
        assert read_shard(write(tmp_path / f"{name}.safetensors", keys=KEYS, **metadata)) is None
    (tmp_path / "c.safetensors").write_text(json.dumps({}))
    assert read_shard(tmp_path / "c.safetensors") is None
    assert read_shard(tmp_path / "absent.safetensors") is None


def test_places_of_texts_and_layers(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", keys=KEYS[:2], layers=(0, 1))
    write(tmp_path / "b.safetensors", keys=[KEYS[2], KEYS[0]], layers=(2,))
    index = ShardIndex(tmp_path)
    index.refresh()
    places = index.find("s", keys=[KEYS[0], KEYS[2], KEYS[3]], layers=(1, 2))
    assert (places.shard == NOWHERE).tolist() == [[False, False], [True, False], [True, True]]
    assert places.row[0].tolist() == [0, 1]
    assert np.array_equal(places.complete(), [0])
    assert index.find("other", keys=KEYS, layers=(0,)).complete().size == 0


def test_refreshing_reads_only_what_appeared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(store_index, "read_shard", lambda path: read.append(path.name) or read_shard(path))
    index = ShardIndex(tmp_path)
    first = write(tmp_path / "a.safetensors", keys=KEYS[:1])
    write(tmp_path / ".b.safetensors", keys=KEYS[:1])  # a temporary name is not looked at
    index.refresh()
    write(tmp_path / "c.safetensors", keys=KEYS[1:2])
    first.unlink()
    index.refresh()
    index.refresh()
    assert read == ["a.safetensors", "c.safetensors"]
    assert [shard.path.name for shard in index.shards()] == ["c.safetensors"]
