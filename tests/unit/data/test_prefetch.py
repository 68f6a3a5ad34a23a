from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.data import prefetch
from flatout.ground.errors import BadInput, FlatoutError
from tests.support.warm_python import warm


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "flatout-prefetch"]


class Source:
    """Counts what was asked of it, and whether it was closed."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.given, self.closed = 0, False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for number in range(self.count):
                if number == self.fails_at:
                    raise RuntimeError(f"record {number} is damaged")
                self.given += 1
                yield {"x": torch.full((2,), number), "n": number}
        finally:
            self.closed = True


@pytest.mark.parametrize("background", [False, True])
def test_batches_arrive_in_order_and_all_of_them(background: bool) -> None:
    source = Source(10)
    batches = prefetch(source, "cpu", background=background)
    assert len(batches) == 10
    for _ in range(2):
        assert [batch["n"] for batch in batches] == list(range(10))
    assert threads() == []


def test_on_the_cpu_a_batch_is_the_batch() -> None:
    loader = [{"x": torch.ones(2)}]
    assert next(iter(prefetch(loader, "cpu"))) is loader[0]


def test_a_device_that_needs_no_stream_gets_its_copy() -> None:
    (batch,) = list(prefetch([{"x": [torch.ones(2)], "name": "a"}], "meta"))
    assert batch["x"][0].device.type == "meta" and batch["name"] == "a"


def test_a_thread_runs_ahead_and_no_further() -> None:
    source = Source(10)
    batches = iter(prefetch(source, "cpu", ahead=2, background=True))
    next(batches)
    assert source.given <= 1 + 2 + 1  # handed out, waiting, and in the thread's hand
    batches.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("background", [False, True])
def test_leaving_in_the_middle_ends_everything(background: bool) -> None:
    source = Source(1000)
    batches = iter(prefetch(source, "cpu", background=background))
    assert [batch["n"] for batch in itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()  # type: ignore[attr-defined]
    assert threads() == []
    assert source.given < 1000
    if background:
        assert source.closed


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_loader_comes_through_after_the_batches_before_it(background: bool) -> None:
    batches = iter(prefetch(Source(10, fails_at=3), "cpu", background=background))
    assert [next(batches)["n"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="record 3 is damaged"):
        next(batches)
    assert threads() == []


DIES = """
import os, sys
import torch
from torch.utils.data import DataLoader
from flatout.data import prefetch
from flatout.ground.errors import FlatoutError

class Dies(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            os._exit(1)  # without a word, as a process killed for its memory
        return index

if __name__ == "__main__":
    loader = DataLoader(Dies(), batch_size=1, num_workers=1)
    try:
        list(prefetch(loader, "cpu", background=sys.argv[1] == "True"))
    except (RuntimeError, FlatoutError) as error:
        print(error)
"""


@pytest.mark.parametrize("background", [False, True])
def test_a_worker_that_dies_is_reported(background: bool, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"  # torch reports by a signal, which may hit any line of the process
    script.write_text(DIES, encoding="utf-8")
    done = warm().run("python", script, str(background))
    assert "DataLoader worker" in done.stdout + done.stderr


def test_a_connection_that_breaks_is_a_worker_that_ended() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ConnectionResetError("reset by peer")

    with pytest.raises(FlatoutError, match="a DataLoader worker ended before its batch was read"):
        list(prefetch(broken(), "cpu"))


def test_at_least_one_ahead() -> None:
    with pytest.raises(BadInput, match="ahead=0"):
        prefetch([], "cpu", ahead=0)
