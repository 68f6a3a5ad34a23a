"""What becomes of workers that were asked for on a cluster; tests/cli/test_ray.py has a real one."""

from __future__ import annotations

import sys

import pytest

from flatout.engines.steering.workers.ray_workers import RayWorkers, run_command
from tests.support.fake_ray import FakeRay


def test_workers_are_named_and_what_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([(2, 0)]).install(monkeypatch)
    said: list[str] = []
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit('no luck')"]
    with RayWorkers(command, workers=1, gpus_each=0, on_progress=said.append) as workers:
        assert [(one.name, one.code) for one in workers.wait()] == [("ray-0", 1)]
    assert len(said) == 1 and "worker ray-0 on " in said[0] and said[0].endswith("exit code 1: no luck")
    assert ray.started[0].options["num_cpus"] == 1
    assert ray.started[0].arguments[2][0][-4:] == ["--device", "cpu", "--worker", "ray-0"]


def test_who_said_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([(2, 0)]).install(monkeypatch)
    said: list[str] = []
    beats: dict[str, object] = {"0": 3, "ray-1": "ended", "ray-2": 7}  # of an earlier search
    workers = RayWorkers(["true"], workers=4, gpus_each=1, beats=lambda: dict(beats), on_progress=said.append)
    with workers:
        beats |= {"ray-0": 1, "ray-2": 8}
        ended = workers.wait()
    assert said[0].startswith("a task takes 1 GPUs and 1 CPUs") and "waiting for one to join" in said[0]
    assert said[1:3] == ["worker ray-1 was not needed", "worker ray-3 was not needed"]
    assert [task.is_cancelled for task in ray.started] == [False, True, False, True]
    assert sorted(one.name for one in ended) == ["ray-0", "ray-1", "ray-2", "ray-3"]
    assert "cuda" in ray.started[0].arguments[2][0]


def test_a_worker_of_a_node_answers_with_its_code_and_last_lines() -> None:
    code = "import sys; [print(i, file=sys.stderr) for i in range(9)]; sys.exit(4)"
    returned, tail, node = run_command([sys.executable, "-c", code])
    assert (returned, tail) == (4, ["4", "5", "6", "7", "8"])
    assert node
