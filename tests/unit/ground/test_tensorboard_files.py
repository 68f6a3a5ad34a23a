"""Event files that TensorBoard's own reader reads, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput
from flatout.ground.tensorboard_files import EventFile

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def test_what_is_added_is_read_back_with_its_step_and_time(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "deep", suffix=".flatout")
    file.add({"loss": 0.5, "lr": 0.25}, step=3, time_s=1e9)
    file.add({"loss": 0.125}, step=4)
    file.close()
    (path,) = (tmp_path / "deep").iterdir()
    assert path.name.startswith("events.out.tfevents.") and path.name.endswith(".flatout")
    events = [event for event in loader.EventFileLoader(str(path)).Load() if event.summary.value]
    assert [(event.step, [value.tag for value in event.summary.value]) for event in events] == [
        (3, ["loss", "lr"]),
        (4, ["loss"]),
    ]
    assert events[0].wall_time == 1e9 < events[1].wall_time


def test_a_full_disk_comes_up_where_it_happened(tmp_path: Path) -> None:
    file = EventFile(tmp_path, when_full="free some space and go on")
    (path,) = tmp_path.iterdir()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file.fileno())
    os.close(full)
    with pytest.raises(BadInput, match="free some space and go on") as caught:
        file.add({"loss": 0.5}, step=1)
    assert str(path) in caught.value.message and os.strerror(errno.ENOSPC) in caught.value.message
    file.close()
