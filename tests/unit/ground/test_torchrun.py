"""The launcher's variables are read in one place, and without them a process is alone."""

from __future__ import annotations

import pytest

from flatout.ground.torchrun import Launch, read_launch


def test_without_a_launcher_a_process_is_the_first_of_one() -> None:
    assert read_launch({}) == Launch()
    assert Launch().is_first and not Launch().is_launched


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**said, "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    found = read_launch()
    assert found == Launch(rank=3, num_ranks=8, local_rank=1, num_local_ranks=2, restarts=1, is_launched=True)
    assert not found.is_first


@pytest.mark.parametrize("text", ["", "one", "-1"])
def test_what_is_not_a_number_counts_as_not_set(text: str) -> None:
    assert read_launch({"RANK": text, "WORLD_SIZE": text}) == Launch()
