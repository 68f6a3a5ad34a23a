"""Which share of a node a task takes, and what is said of a cluster that is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput, MissingExtra
from flatout.hardware.ray_cluster import NODE_LABEL, RayCluster
from tests.support.fake_ray import FakeRay


def test_a_timed_task_has_the_cores_of_its_gpus_or_a_whole_node(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay([(4, 0), (32, 8), (16, 8)]).install(monkeypatch)
    with RayCluster("auto") as cluster:
        assert (cluster.cpus, cluster.slots()) == (32, 1)  # the roomiest node decides what kind of node it is
        cluster.take(1)
        assert (cluster.gpus, cluster.cpus, cluster.slots()) == (1, 4, 8 + 4)
        cluster.take(2)
        assert (cluster.cpus, cluster.slots()) == (8, 4 + 2)
    with RayCluster("auto", gpus=2, cpus=1) as cluster:
        assert cluster.slots() == 8 and cluster.describe_lack() is None


def test_a_cluster_without_room_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([(4, 0)]).install(monkeypatch)
    with RayCluster("auto", gpus=2) as cluster:
        assert cluster.describe_lack() == (
            "a task takes 2 GPUs and 1 CPUs; a node of the Ray cluster has at most 0 and 4:"
            " waiting for one to join"
        )
        ray.rooms.append((64, 8))  # it joins
        assert cluster.describe_lack() is None and cluster.cpus == 16
        cluster.take(2)
    ray.rooms = []
    with RayCluster("auto") as cluster:
        assert "at most 0 and 0" in str(cluster.describe_lack())
        cluster.take(2)
        assert cluster.gpus == 0  # a cluster of CPUs alone


def test_a_task_runs_where_the_command_was_given_and_leaves_with_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay([(1, 0), (1, 0)]).install(monkeypatch)
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.chdir(copy)
    with RayCluster("auto") as cluster:
        copy.rename(tmp_path / "before")  # as Ray does when it makes its copy of a job's folder anew
        copy.mkdir()
        task = cluster.submit(os.getcwd)
        assert cluster.result(task) == ("node-1", str(copy))
        bad = cluster.submit(int, "x")
        with pytest.raises(BadInput, match=r"a task on the Ray cluster failed: ValueError.*'x'"):
            cluster.result(bad)
        cluster.avoid("node-1")
        left = cluster.submit(os.getpid)
    options = ray.started[-1].options
    assert options["label_selector"] == {NODE_LABEL: "!in(node-1)"} and options["max_retries"] == -1
    assert left.is_cancelled and not bad.is_cancelled and not ray.is_connected


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay([]).install(monkeypatch)
    with (
        pytest.raises(BadInput, match="no Ray cluster at 'nowhere:1': nobody listens"),
        RayCluster("nowhere:1"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"flatout\[ray\]"):
        RayCluster("auto")
