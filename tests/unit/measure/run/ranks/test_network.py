from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as distributed

from flatout.measure.run.ranks.network import all_ready, bus_bandwidth, link_speed, measure_network


def test_bandwidth_is_the_slope_without_the_latency() -> None:
    """1 ms of latency, and 100 MB/s through each link."""
    times = [(size, 0.001 + size * 1.5 / 100e6) for size in (1_000_000, 16_000_000)]
    assert bus_bandwidth(*times, num_ranks=4) == pytest.approx(100e6)
    assert bus_bandwidth((1, 1.0), (2, 1.0), num_ranks=2) is None


@pytest.mark.parametrize(("able", "answers"), [((True, True), [True, True]), ((True, False), [False, False])])
def test_ranks_begin_together_or_not_at_all(able: tuple[bool, bool], answers: list[bool]) -> None:
    store = distributed.HashStore()
    found: dict[int, bool] = {}

    def ask(rank: int) -> None:
        found[rank] = all_ready(store, 2, able[rank])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[rank] for rank in range(2)] == answers


def test_a_rank_that_stays_alone_does_not_begin() -> None:
    assert not all_ready(distributed.HashStore(), 2, True, wait_s=0.0)


def test_an_all_reduce_is_timed_in_a_group_of_one(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        network = measure_network("cpu", distributed.HashStore())
    finally:
        distributed.destroy_process_group()
    assert network is not None
    assert network.backend == "gloo"
    assert network.small_s > 0 and network.large_s > 0


def card(system: Path, name: str, speed: str, *, physical: bool = True) -> None:
    (system / "net" / name).mkdir(parents=True)
    (system / "net" / name / "speed").write_text(f"{speed}\n")
    if physical:
        (system / "net" / name / "device").mkdir()


def test_the_link_is_the_fastest_card_that_is_up(tmp_path: Path) -> None:
    assert link_speed("gloo", tmp_path) == (None, None)
    card(tmp_path, "veth0", "10000", physical=False)
    card(tmp_path, "eth1", "-1")
    assert link_speed("gloo", tmp_path) == (None, None)
    card(tmp_path, "eth0", "1000")
    card(tmp_path, "eth2", "25000")
    assert link_speed("gloo", tmp_path) == ("eth2", 25e9 / 8)


def test_nccl_uses_all_infiniband_ports_that_are_up(tmp_path: Path) -> None:
    card(tmp_path, "eth0", "1000")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "state").write_text(f"{state}\n")
    assert link_speed("nccl", tmp_path) == ("mlx5_0+mlx5_1", 100e9)
    assert link_speed("gloo", tmp_path) == ("eth0", 125e6)
