"""The broadcaster: each browser gets what it has not seen, and one that does not read gets it later."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.runs import create_run, end_run
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sampler import Sampler
from flatout.monitor.web import feed as room
from flatout.monitor.web.feed import MACHINE, MOST_OPEN, Feed, RunList
from tests.support.monitor_web import HOSTILE, START_S, logged_run, run, sample

Events = list[tuple[str, Any]]


def decoded(chunk: bytes) -> Events:
    found = []
    for block in chunk.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def until(stream: AsyncIterator[bytes], name: str) -> Events:
    heard: Events = []
    async for chunk in stream:
        heard += decoded(chunk)
        if any(each == name for each, _ in heard):
            return heard
    raise AssertionError(f"ended before {name}")


def follow(feed: Feed, keys: list[str], **options: Any) -> AsyncIterator[bytes]:
    client = feed.admit()
    assert client is not None
    return feed.events(keys, client, **options)


def played(test: Callable[[Feed], Awaitable[None]], **options: Any) -> None:
    """Run a test in a loop, with a feed that has begun."""

    async def main() -> None:
        feed = Feed(**options)
        await feed.begin()
        await asyncio.wait_for(test(feed), timeout=60)

    asyncio.run(main())


def test_history_first_then_each_sample(tmp_path: Path) -> None:
    sampler = Sampler()

    async def test(feed: Feed) -> None:
        feed.hear(sample(0))
        feed.hear(sample(1))
        await asyncio.sleep(0)
        stream = follow(feed, [])
        names = [name for name, _ in await until(stream, "ready")]
        assert names == ["runs", "history", "ready"]
        feed.hear(sample(2))
        [(name, document)] = await until(stream, "sample")
        assert (name, document["run"]) == ("sample", "machine")
        assert document["sample"]["time_s"] == START_S + 2
        feed.close()
        assert [chunk async for chunk in stream] == []
        assert not feed.clients

    played(test, sampler=sampler, root=tmp_path)


def test_all_browsers_share_the_bytes_of_an_event(tmp_path: Path) -> None:
    async def test(feed: Feed) -> None:
        streams = [follow(feed, []) for _ in range(5)]
        for stream in streams:
            await until(stream, "ready")
        feed.hear(sample(0))
        feed.hear(sample(1))
        await asyncio.sleep(0)
        chunks = [await anext(stream) for stream in streams]
        assert all(chunk == chunks[0] for chunk in chunks)
        feed.hear(sample(2))
        chunks = [await anext(stream) for stream in streams]
        assert len({id(chunk) for chunk in chunks}) == 1
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]

    played(test, sampler=Sampler(), root=tmp_path)


def test_a_browser_that_does_not_read_is_sent_once_what_it_missed(tmp_path: Path) -> None:
    async def test(feed: Feed) -> None:
        feed.hear(sample(0))
        await asyncio.sleep(0)
        stream = follow(feed, [])
        await until(stream, "ready")
        for second in range(1, 500):
            feed.hear(sample(second))
        await asyncio.sleep(0)
        [(name, document)] = decoded(await anext(stream))
        assert name == "history"
        assert len(document["at_s"]) == 499
        assert document["sample"]["time_s"] == START_S + 499
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, sampler=Sampler(), root=tmp_path)


def test_runs_of_other_processes_are_followed_side_by_side(tmp_path: Path) -> None:
    folder = create_run(run("live"), tmp_path)
    writer = HistoryWriter(folder)
    writer(sample(0))
    ended = logged_run(tmp_path, [sample(second) for second in range(20)], name="ended", pid=2)

    async def test(feed: Feed) -> None:
        stream = follow(feed, [folder.name, ended.name])
        heard = await until(stream, "ready")
        assert [document["run"] for name, document in heard if name == "history"] == [folder.name, ended.name]
        writer(sample(1))
        await feed.look()
        [(name, document)] = decoded(await anext(stream))
        assert (name, document["run"], document["sample"]["time_s"]) == ("sample", folder.name, START_S + 1)
        assert set(feed.streams) == {folder.name, ended.name}
        await stream.aclose()  # type: ignore[attr-defined]
        assert feed.streams == {}

    played(test, root=tmp_path)
    writer.close()


def test_the_list_of_runs_is_sent_when_it_changes(tmp_path: Path) -> None:
    async def test(feed: Feed) -> None:
        stream = follow(feed, [])
        await until(stream, "ready")
        await feed.look(lists_runs=True)
        create_run(run("appears"), tmp_path)
        await feed.look(lists_runs=True)
        [(name, document)] = decoded(await anext(stream))
        assert name == "runs"
        assert [entry["name"] for entry in document["runs"]] == ["appears"]
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, root=tmp_path)


def test_a_run_that_began_while_nobody_looked_is_opened(tmp_path: Path) -> None:
    async def test(feed: Feed) -> None:
        folder = logged_run(tmp_path, [sample(0)])
        stream = follow(feed, [])
        heard = await until(stream, "ready")
        assert heard[-1][1]["runs"] == [folder.name]
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, sampler=Sampler(), root=tmp_path)


def test_a_key_that_is_none_opens_nothing(tmp_path: Path) -> None:
    outside = logged_run(tmp_path / "outside", [sample(0)])
    (tmp_path / "runs").mkdir()

    async def test(feed: Feed) -> None:
        stream = follow(feed, [f"../outside/{outside.name}", str(outside), ""])
        heard = await until(stream, "ready")
        assert heard[-1] == ("ready", {"runs": []})
        assert feed.streams == {}
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, root=tmp_path / "runs")


def test_no_more_than_some_runs_are_open_at_once(tmp_path: Path) -> None:
    keys = [logged_run(tmp_path, [sample(0)], pid=number).name for number in range(1, MOST_OPEN + 3)]

    async def test(feed: Feed) -> None:
        stream = follow(feed, [*keys, *keys])
        heard = await until(stream, "ready")
        assert heard[-1][1]["runs"] == keys[:MOST_OPEN]
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, root=tmp_path)


def test_one_that_comes_again_is_not_sent_everything(tmp_path: Path) -> None:
    async def test(feed: Feed) -> None:
        for second in range(200):
            feed.hear(sample(second))
        await asyncio.sleep(0)
        stream = follow(feed, [], after_s=START_S + 198)
        heard = await until(stream, "ready")
        history = next(document for name, document in heard if name == "history")
        assert not history["is_whole"]
        assert len(history["at_s"]) < 40
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, sampler=Sampler(), root=tmp_path)


def test_silence_is_broken_by_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BEAT_S", 0.01)

    async def test(feed: Feed) -> None:
        stream = follow(feed, [])
        await until(stream, "ready")
        assert await until(stream, "beat")
        await stream.aclose()  # type: ignore[attr-defined]

    played(test, root=tmp_path)


def test_what_the_sampler_saw_before_is_in_the_history(tmp_path: Path) -> None:
    sampler = Sampler()
    first = sampler.take()

    async def test(feed: Feed) -> None:
        assert feed.hear in sampler.listeners
        second = sampler.take()
        await asyncio.sleep(0)
        stream = follow(feed, [])
        history = next(document for name, document in await until(stream, "ready") if name == "history")
        assert history["start_s"] == pytest.approx(first.time_s, abs=0.01)
        assert history["sample"]["time_s"] == pytest.approx(second.time_s, abs=0.01)
        await stream.aclose()  # type: ignore[attr-defined]
        feed.close()
        assert feed.hear not in sampler.listeners

    played(test, sampler=sampler, root=tmp_path)
    sampler.take()  # nobody listens, and nothing fails


# The list of runs: what is opened first, and that a key is never a path


def test_the_latest_run_is_opened_where_nothing_is_said(tmp_path: Path) -> None:
    create_run(run("first", pid=1), tmp_path)
    later = create_run(run("second", pid=2, ended_s=START_S + 9), tmp_path)
    shutil.copytree(later, tmp_path / "20991231-235959-copy-1")
    runs = RunList(root=tmp_path)
    assert len(runs.entries) == 3
    assert runs.first == [next(iter(runs.folders))]
    states = {entry.name: entry.state for entry in runs.entries}
    assert states["second"] == "ended"


def test_folders_that_are_given_come_first_even_from_elsewhere(tmp_path: Path) -> None:
    inside = create_run(run("inside", pid=1), tmp_path / "runs")
    outside = create_run(run("outside", pid=2), tmp_path / "elsewhere")
    runs = RunList(folders=[outside, inside], root=tmp_path / "runs")
    assert runs.first == [outside.name, inside.name]
    assert [entry.name for entry in runs.entries] == ["outside", "inside"]


def test_two_folders_of_one_name_have_two_keys(tmp_path: Path) -> None:
    one = create_run(run("same", pid=1), tmp_path / "a")
    two = create_run(run("same", pid=1), tmp_path / "b")
    assert one.name == two.name
    runs = RunList(folders=[two], root=tmp_path / "a")
    assert sorted(runs.folders.values()) == sorted([one, two])


def test_the_samplers_own_run_is_opened_first(tmp_path: Path) -> None:
    folder = create_run(run("own", pid=2, ended_s=START_S + 1), tmp_path)
    create_run(run("other"), tmp_path)
    own = RunList(sampler=Sampler(job=folder), root=tmp_path)
    assert own.first == [own.own_key] == [folder.name]


def test_a_machine_without_a_job_opens_the_run_that_is_under_way(tmp_path: Path) -> None:
    ended = create_run(run("ended", pid=2, ended_s=START_S + 9), tmp_path)
    machine = RunList(sampler=Sampler(), root=tmp_path)
    assert machine.first == [MACHINE]
    assert machine.entries[0].name == "this machine"
    assert MACHINE not in machine.folders
    under_way = create_run(run("under way"), tmp_path)
    machine.read()
    assert machine.first == [under_way.name]
    assert RunList(sampler=Sampler(), folders=[ended], root=tmp_path).first == [ended.name]


def test_a_run_that_appears_is_found_and_one_that_is_damaged_left_out(tmp_path: Path) -> None:
    runs = RunList(root=tmp_path)
    assert runs.entries == ()
    assert runs.first == []
    folder = create_run(run(HOSTILE, pid=3), tmp_path)
    (tmp_path / "rubbish").mkdir()
    [entry] = runs.read()
    assert entry.to_json()["name"] == HOSTILE
    assert entry.key == folder.name
    end_run(folder, time_s=START_S, end="ValueError: x", exit_code=1)
    assert runs.read()[0].to_json()["ending"] == "failed: ValueError: x"
    (folder / "run.json").write_text("{")
    assert runs.read() == ()
