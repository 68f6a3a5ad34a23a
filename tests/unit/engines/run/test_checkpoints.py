"""A checkpoint is whole or absent, and says which file is damaged."""

from __future__ import annotations

import dataclasses
import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from flatout.engines.run.checkpoints import STATE, Checkpoints, thread_note
from flatout.ground import atomic_files
from flatout.ground.errors import BadInput

TENSORS = "tensors.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    FORMAT: ClassVar[str] = "test-checkpoint"
    epoch: int
    finished: bool = False
    score: float | None = None
    format: str = FORMAT
    version: int = 1


TENSOR = {"a/b": torch.arange(6.0).view(2, 3).mT, "n": torch.tensor(3)}


def in_folder(folder: Path) -> Checkpoints[State]:
    return Checkpoints(folder, counter="epoch", state=State, extra="evolution")


def save(folder: Path, epoch: int, *, keep: int = 2, **changes: object) -> Path:
    state = dataclasses.replace(State(epoch=epoch), **changes)  # type: ignore[arg-type]
    return in_folder(folder).save(epoch, state=state, files={"tensors": TENSOR, "best": {}}, keep=keep)


def latest_epoch(folder: Path) -> int:
    found = in_folder(folder).latest()
    assert found is not None
    return found.state.epoch


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    assert in_folder(tmp_path / "absent").latest() is None
    save(tmp_path, 3, score=0.5)
    found = in_folder(tmp_path).latest()
    assert found is not None and found.state == State(epoch=3, score=0.5)
    assert {name: value.tolist() for name, value in found.tensors().items()} == {
        name: value.tolist() for name, value in TENSOR.items()
    }
    assert found.tensors("best") == {}


def test_the_last_ones_are_kept_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for epoch in (2, 9, 10, 1_000_000, 999_999):
        save(tmp_path, epoch)
    assert [path.name for path in in_folder(tmp_path).paths()] == ["epoch-999999", "epoch-1000000"]
    assert latest_epoch(tmp_path) == 1_000_000


def test_the_same_step_once_more_changes_only_its_state(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    before = (path / TENSORS).stat().st_mtime_ns
    save(tmp_path, 3, finished=True)
    assert in_folder(tmp_path).read_state(path).finished
    assert (path / TENSORS).stat().st_mtime_ns == before


def test_an_end_while_saving_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert latest_epoch(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-000001"]
    (tmp_path / f".epoch-000002{atomic_files.PARTIAL}").mkdir()  # as a kill leaves it
    assert latest_epoch(tmp_path) == 1
    save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-000001", "epoch-000002"]


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\x01", None])
def test_a_damaged_file_is_named(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = save(tmp_path, 1) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=f"{name} cannot be read") as error:
        in_folder(tmp_path).latest().tensors()  # type: ignore[union-attr]
    assert "\n" not in str(error.value)


def test_other_formats_and_later_versions_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / STATE
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "version": 99}))
    with pytest.raises(BadInput, match="version 99"):
        in_folder(tmp_path).latest()
    path.write_text(json.dumps({**written, "format": "other"}))
    with pytest.raises(BadInput, match="is not a test-checkpoint but 'other'"):
        in_folder(tmp_path).latest()


def test_a_full_disk_is_no_defect_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    large = {"tensors": {"large": torch.zeros(1 << 18)}}
    try:
        with pytest.raises(BadInput, match=r"File too large.*continue with --resume"):
            in_folder(tmp_path).save(2, state=State(epoch=2), files=large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert latest_epoch(tmp_path) == 1


def test_another_number_of_threads_is_said_on_a_cpu() -> None:
    here = torch.get_num_threads()
    assert thread_note(here, on_cpu=True) is thread_note(here + 1, on_cpu=False) is None
    assert f"had {here + 1} threads" in str(thread_note(here + 1, on_cpu=True))
