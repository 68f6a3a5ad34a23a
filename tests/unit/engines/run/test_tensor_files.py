"""safetensors files are written whole, and refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flatout.engines.run.tensor_files import load_tensors, open_tensors, save_tensors
from flatout.ground.errors import BadInput


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.safetensors"
    grown = torch.ones(3, requires_grad=True) * 2
    save_tensors(path, {"a": grown, "b": torch.eye(3).T}, extra="steering", metadata={"format": "ours"})
    with open_tensors(path, extra="steering") as (file, metadata):
        assert metadata == {"format": "ours"}
        assert torch.equal(file.get_tensor("a"), grown.detach())
        assert torch.equal(file.get_tensor("b"), torch.eye(3))
    found = load_tensors(path, extra="steering", hint="")
    assert found.keys() == {"a", "b"} and torch.equal(found["b"], torch.eye(3))
    assert [each.name for each in path.parent.iterdir()] == ["a.safetensors"]


def test_a_file_that_is_cut_or_absent_is_named_with_a_hint(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", {"a": torch.ones(3)}, extra="steering")
    (tmp_path / "cut").write_bytes((tmp_path / "a").read_bytes()[:-2])
    for name in ("cut", "absent"):
        with (
            pytest.raises(BadInput, match=r"cannot be read: .*\(try another\)"),
            open_tensors(tmp_path / name, extra="steering", hint="try another"),
        ):
            pass
        with pytest.raises(BadInput, match=r"cannot be read: .*\(try another\)"):
            load_tensors(tmp_path / name, extra="steering", hint="try another")
