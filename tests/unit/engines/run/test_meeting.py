"""Ranks meet in a store that outlives them, and agree on a folder before anything is computed."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from flatout.engines.run import meeting as meetings
from flatout.engines.run.folder import check_empty
from flatout.engines.run.meeting import Meeting, meet
from flatout.ground.errors import BadInput, ChildDied
from flatout.ground.torchrun import Launch


def launch(rank: int, num_ranks: int = 2, **changes: Any) -> Launch:
    return Launch(rank=rank, num_ranks=num_ranks, node=rank, is_launched=True, **changes)


def on_each(work: Callable[[Meeting], Any], store: Store, *launches: Launch) -> list[Any]:
    """What `work` returns, or the error that it raises, on each rank of one attempt."""

    def run(one: Launch) -> Any:
        try:
            return work(Meeting(one, store=store))
        except BadInput as error:
            return error

    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(run, launches))


def chosen(
    folder: Path, asked: list[bool], *, begun: Path | None = None
) -> Callable[[Meeting], tuple[Path, bool]]:
    def choose(resume: bool) -> Path:
        asked.append(resume)
        return folder

    return lambda meeting: meeting.begin(choose, begun=lambda: begun, resume=False)


def test_alone_nobody_is_waited_for(tmp_path: Path) -> None:
    alone = Meeting(Launch())
    assert alone.first and alone.gather("x") == ["x"]
    out = tmp_path / "run"
    assert alone.begin(lambda resume: out, begun=lambda: None, resume=True) == (out, True)
    alone.agree("anything", 1)
    assert not (tmp_path / "run").exists()


def test_texts_of_all_ranks_come_in_their_order() -> None:
    store = HashStore()
    found = on_each(
        lambda each: [each.gather(f"{turn} of {each.launch.rank}") for turn in range(4)],
        store,
        *(launch(rank, 3) for rank in range(3)),
    )
    assert found == 3 * [[[f"{turn} of {rank}" for rank in range(3)] for turn in range(4)]]


def test_the_first_chooses_for_all_and_one_that_was_started_again_resumes_for_all(tmp_path: Path) -> None:
    store, asked, out = HashStore(), list[bool](), tmp_path / "run"
    assert on_each(chosen(out, asked), store, launch(0), launch(1)) == 2 * [(out, False)]
    assert asked == [False]
    check_empty(out)
    again = on_each(chosen(out, asked), store, launch(0), launch(1, restarts=1))
    assert again == 2 * [(out, True)] and asked == [False, True]
    # A node joins: nobody counts a restart, and the run that the job has begun goes on.
    joined = on_each(
        chosen(tmp_path / "other", asked, begun=out), store, *(launch(rank, 3) for rank in range(3))
    )
    assert joined == 3 * [(out, True)] and asked == [False, True]


def test_a_rank_of_an_attempt_before_is_not_waited_for() -> None:
    store = HashStore()
    # Rank 1 died after it had said that it is here.
    store.set("flatout/2/1", "dead")
    found = on_each(lambda each: each.gather(str(each.launch.rank)), store, launch(0), launch(1))
    assert found == 2 * [["0", "1"]]


def test_the_first_asks_again_when_another_takes_the_place_of_a_dead_one() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        store.set("flatout/3/2", "dead")
        early = [pool.submit(meet, store, rank=rank, num_ranks=3) for rank in (0, 1)]
        store.wait(["dead"], timedelta(seconds=60))  # the first has named a group with the dead one in it
        late = pool.submit(meet, store, rank=2, num_ranks=3)
        groups = {each.result(timeout=60) for each in (*early, late)}
    assert len(groups) == 1


def test_a_rank_that_is_not_told_where_to_meet_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meetings, "end_with_parent", lambda: None)
    with pytest.raises(BadInput, match=r"rank 1 of 2 .* MASTER_ADDR"):
        Meeting.join()


def test_who_does_not_come_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "PATIENCE", timedelta(seconds=0.05))
    with pytest.raises(ChildDied, match="1 of 2 came"):
        Meeting(launch(0), store=HashStore())


@pytest.mark.parametrize("has_store", [True, False])
def test_who_is_late_is_named_once_on_each_node(has_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "TELL_AFTER_S", 0.05)
    store, told = HashStore(), list[str]()
    launches = [launch(0, 4), launch(1, 4, local_rank=1), launch(2, 4), launch(3, 4, local_rank=1)]
    launches = [dataclasses.replace(each, has_store=has_store) for each in launches]

    def join(one: Launch) -> str:
        return Meeting(one, store=store, on_progress=told.append).gather("here")[0]

    with ThreadPoolExecutor(4) as pool:
        late = [pool.submit(join, each) for each in launches[2:]]  # the first is not there yet
        while not told:
            time.sleep(0.01)
        first = pool.submit(join, launches[0])
        while len(told) < 2:
            time.sleep(0.01)
        last = pool.submit(join, launches[1])
        assert [each.result(timeout=60) for each in (first, last, *late)] == 4 * ["here"]
    assert [each.partition(";")[0] for each in told] == [
        "waiting for rank 0 of 4",
        "waiting for rank 1 of 4",
    ]
    assert all(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in each) == has_store for each in told)


def test_a_node_with_a_disk_of_its_own_is_named_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "SEEN_WITHIN_S", 0.2)
    (tmp_path / "b" / "run").mkdir(parents=True)

    def begin(each: Meeting) -> None:
        # One name, two disks: the folder of the second node is another one.
        each.check_shared(tmp_path / "ab"[each.launch.rank] / "run")

    errors = on_each(begin, HashStore(), launch(0), launch(1))
    for error in errors:
        assert isinstance(error, BadInput)
        assert "(node 0)" in str(error) and "(node 1)" in str(error) and "--out" in str(error)
    assert not list((tmp_path / "a" / "run").iterdir())
    shutil.rmtree(tmp_path / "b")
    assert all(isinstance(error, BadInput) for error in on_each(begin, HashStore(), launch(0), launch(1)))


def test_what_differs_is_said_on_every_rank() -> None:
    errors = on_each(
        lambda each: each.agree("the epoch", each.launch.rank), HashStore(), launch(0), launch(1)
    )
    assert [str(error).startswith("ranks differ in the epoch: 0, 1") for error in errors] == [True, True]
