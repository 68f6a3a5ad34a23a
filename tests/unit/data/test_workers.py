from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data import choose_workers
from flatout.data.workers import WorkerTrials, _candidates, _decide, _does_not_fit
from flatout.ground.errors import BadInput
from flatout.hardware.host import read_host

HOST = dataclasses.replace(
    read_host(),
    cores=6.0,
    cores_limited_by="the control group",
    memory_bytes=1000,
    memory_used_bytes=200,
    shm_free_bytes=1000,
)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def trials(**batch_s: float) -> list[WorkerTrials]:
    return [WorkerTrials(workers=int(name[1:]), batch_s=[seconds]) for name, seconds in batch_s.items()]


def test_data_in_memory_needs_no_workers() -> None:
    decision = choose_workers(Numbers(200_000), 16, candidates=[0, 1], seconds=0.3)
    assert decision.value == 0 and decision.source == "measured"
    assert "0: " in decision.reason and "1: " in decision.reason


def test_the_fewest_of_the_fastest() -> None:
    assert _decide(trials(w0=1.0, w1=0.9, w2=0.50, w4=0.49), HOST, None).value == 2


def test_the_fewest_that_hide_the_loading_behind_the_step() -> None:
    measured = trials(w0=0.4, w1=0.5, w2=0.3, w4=0.1)
    assert _decide(measured, HOST, 1.0).value == 1
    assert _decide(measured, HOST, 0.3).value == 2
    assert _decide(measured, HOST, 0.05).value == 4
    # hidden or not, loading that takes no time needs no process
    assert _decide(trials(w0=0.001, w2=0.5), HOST, 1.0).value == 0


def test_the_reason_shows_what_was_measured_and_what_was_not() -> None:
    measured = [*trials(w0=0.5), WorkerTrials(workers=64, skipped="1 GiB of memory, 10 MiB are free")]
    reason = _decide(measured, HOST, 0.25).reason
    for part in ("0: 500 ms", "750 ms", "6 cores (the control group)", "64 not tried: 1 GiB"):
        assert part in reason


def test_candidates_stay_within_the_cores() -> None:
    assert _candidates(None, HOST) == [0, 1, 2, 4, 6]
    assert _candidates(None, dataclasses.replace(HOST, cores=0.5)) == [0, 1]
    assert _candidates([4, 0, 4], HOST) == [0, 4]
    for wrong in ([], [-1]):
        with pytest.raises(BadInput, match="candidates"):
            _candidates(wrong, HOST)


def test_workers_that_would_not_fit_are_not_tried() -> None:
    known = [WorkerTrials(workers=1, batch_s=[1.0], worker_bytes=100, batch_bytes=10)]
    assert _does_not_fit(8, 4, known, HOST) is None
    assert "of memory, 800 B are free" in (_does_not_fit(16, 8, known, HOST) or "")
    assert "/dev/shm has 1000 B" in (_does_not_fit(100, 2, known, HOST) or "")
    assert _does_not_fit(0, 0, known, HOST) is None
    assert _does_not_fit(16, 8, [], HOST) is None


def test_an_epoch_too_short_for_many_workers_is_said() -> None:
    decision = choose_workers(Numbers(8), 2, candidates=[0, 2], seconds=0.01)
    assert decision.value == 0 and "2 not tried: an epoch is over" in decision.reason
    with pytest.raises(BadInput, match="no batch to measure"):
        choose_workers(Numbers(0), 2, candidates=[0], sampler=[])
    with pytest.raises(BadInput, match="no number of workers could be measured"):
        choose_workers(Numbers(2), 2, candidates=[0], seconds=0.01)


def test_any_loader_class_with_its_options() -> None:
    made: list[dict[str, Any]] = []

    class Loader(DataLoader[Any]):
        def __init__(self, dataset: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(dataset, **options)

    choose_workers(
        Numbers(64), 4, candidates=[0, 1], seconds=0.01, loader=Loader, prefetch_factor=3,
        persistent_workers=True, collate_fn=torch.tensor,
    )  # fmt: skip
    assert {options["num_workers"] for options in made} == {0, 1}
    assert all(options["collate_fn"] is torch.tensor and options["batch_size"] == 4 for options in made)
    assert all(("prefetch_factor" in options) == (options["num_workers"] > 0) for options in made)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
def test_the_stateful_loader() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    decision = choose_workers(
        Numbers(2000), 4, candidates=[0], seconds=0.05, loader=stateful.StatefulDataLoader
    )
    assert decision.value == 0
