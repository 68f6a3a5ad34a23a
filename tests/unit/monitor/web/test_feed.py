"""The broadcaster: each browser gets what it has not seen, and one that does not read gets it later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.ground.runs import create_run
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sampler import Sampler
from flatout.monitor.web import feed as room
from flatout.monitor.web.feed import MOST_OPEN, Feed
from tests.support.monitor_web import START_S, logged_run, run, sample

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
        assert heard[-1][1]["runs"] == []
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
