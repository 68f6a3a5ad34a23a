"""A checkpoint is whole or absent, and knows the model it belongs to."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout import atomic_files
from flatout.engines.evolution.training import checkpoint
from flatout.engines.evolution.training.checkpoint import STATE, TENSORS, State, fingerprint, latest, save
from flatout.errors import BadInput


def state(epoch: int, **changes: Any) -> State:
    values: dict[str, Any] = {
        "epoch": epoch,
        "config": {"sigma": 0.1, "targets": ["a"], "rows": None},
        "fingerprint": "f",
        "threads": 1,
        "rows": 8,
        "chunk_members": 4,
        "max_tokens": 64,
        "untrained_score": None,
        "elapsed_s": 1.5,
    }
    return State(**{**values, **changes})


TENSOR = {"a/b": torch.arange(6.0).view(2, 3).mT, "n": torch.tensor(3)}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    save(tmp_path, state=state(3), tensors=TENSOR)
    found = latest(tmp_path)
    assert found is not None
    assert found.state == state(3)
    assert {name: value.tolist() for name, value in found.tensors.items()} == {
        name: value.tolist() for name, value in TENSOR.items()
    }


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for epoch in (2, 9, 10, 11):
        save(tmp_path, state=state(epoch), tensors=TENSOR, keep=2)
    assert [path.name for path in checkpoint.epochs(tmp_path)] == ["epoch-000010", "epoch-000011"]
    assert latest(tmp_path).state.epoch == 11  # type: ignore[union-attr]


def test_an_end_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, state=state(1), tensors=TENSOR)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "_flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state=state(2), tensors=TENSOR)
    assert latest(tmp_path).state.epoch == 1  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001"]
    (tmp_path / f".epoch-000002{atomic_files.PARTIAL}").mkdir()  # as a kill leaves it
    assert latest(tmp_path).state.epoch == 1  # type: ignore[union-attr]
    save(tmp_path, state=state(2), tensors=TENSOR)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000001", "epoch-000002"]


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\x01", None])
def test_a_damaged_file_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = save(tmp_path, state=state(1), tensors=TENSOR) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=f"{name} cannot be read") as error:
        latest(tmp_path)
    assert "\n" not in str(error.value)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, state=state(1, version=99), tensors=TENSOR)
    with pytest.raises(BadInput, match="version 99"):
        latest(tmp_path)


def test_a_fingerprint_tells_models_apart() -> None:
    def of(**changes: Any) -> str:
        return fingerprint({"a": torch.arange(5000.0), "b": torch.ones(2, 2), **changes}.items())

    assert of() == of()
    others = [
        of(b=torch.ones(4)),
        of(b=torch.ones(2, 2, dtype=torch.bfloat16)),
        of(a=torch.arange(5000.0) + 1e-3),
        of(c=torch.ones(1)),
    ]
    assert len({of(), *others}) == 5


def test_a_full_disk_is_no_defect_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, state=state(1), tensors=TENSOR)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(BadInput, match=r"File too large.*go on with --resume"):
            save(tmp_path, state=state(2), tensors={"large": torch.zeros(1 << 18)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = latest(tmp_path)
    assert found is not None and found.state.epoch == 1
