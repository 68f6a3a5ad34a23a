"""Keys make views of views; the order of processes never takes an unknown figure for a large one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.sample import ProcessSample, Sample
from flatout.monitor.terminal.view import SORTS, View, sorted_processes

KEYS = ["q", "s", "next", "previous", "p", "space", "?", "escape", "x", "interrupt"]


def test_sort_goes_round_all_columns() -> None:
    view = View()
    seen = []
    for _ in SORTS:
        seen.append(view.sort)
        view = view.pressed("s", num_gpus=1)
    assert seen == list(SORTS)
    assert view.sort == seen[0]


def test_without_a_gpu_its_columns_are_not_sorted_by() -> None:
    view = View()
    seen = []
    for _ in range(3):
        seen.append(view.sorted_by(0))
        view = view.pressed("s", num_gpus=0)
    assert seen == ["CPU", "RAM", "pid"]
    assert view.sorted_by(0) == "CPU"


def test_the_gpu_goes_round_in_both_directions() -> None:
    view = View().pressed("previous", num_gpus=3)
    assert view.gpu == 2
    assert view.pressed("next", num_gpus=3).gpu == 0
    assert View().pressed("next", num_gpus=0).gpu == 0


def test_help_is_closed_by_the_key_that_opened_it_and_q_does_not_quit_from_there() -> None:
    helped = View().pressed("?", num_gpus=1)
    assert helped.shows_help
    for key in ("?", "escape", "q"):
        closed = helped.pressed(key, num_gpus=1)
        assert not closed.shows_help and not closed.is_over


@pytest.mark.parametrize("key", ["q", "Q", "interrupt"])
def test_quit(key: str) -> None:
    assert View().pressed(key, num_gpus=1).is_over


def test_hold_and_processes_are_switches() -> None:
    view = View().pressed("space", num_gpus=1).pressed("p", num_gpus=1)
    assert view.is_held and not view.shows_processes
    assert view.pressed("space", num_gpus=1).pressed("p", num_gpus=1) == View()


@given(st.lists(st.sampled_from(KEYS), max_size=30), st.integers(0, 9))
def test_no_keys_lead_to_a_gpu_that_is_not_there(keys: list[str], num_gpus: int) -> None:
    view = View()
    for key in keys:
        view = view.pressed(key, num_gpus=num_gpus)
    assert 0 <= view.gpu < max(num_gpus, 1)
    assert view.sort in SORTS


@pytest.mark.parametrize("sort", SORTS)
def test_the_largest_is_first_and_the_unknown_last(sort: str) -> None:
    small = ProcessSample(pid=1, gpu_memory_bytes=1, sm_share=0.1, cpu_cores=0.1, memory_bytes=1)
    large = ProcessSample(pid=2, gpu_memory_bytes=9, sm_share=0.9, cpu_cores=0.9, memory_bytes=9)
    unknown = ProcessSample(pid=3)
    order = [each.pid for each in sorted_processes(Sample(time_s=0, processes=(unknown, small, large)), sort)]
    assert order == ([1, 2, 3] if sort == "pid" else [2, 1, 3])
