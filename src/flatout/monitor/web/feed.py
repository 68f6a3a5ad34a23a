"""One broadcaster for all browsers.

A browser is not given a queue.  It has a position in each run it shows, and a flag that says there is more;
when its connection takes data again, it is sent what is then the latest, or the columns of all it missed.
So a browser that never reads costs its connection's buffer and nothing that grows, and fifty that do read
share the bytes of each event.

A browser names a run by its key in the list of runs, which is looked up and never becomes a path.

Everything here runs in the server's event loop; `hear` alone is called from the sampler's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from flatout.monitor.fleet.logs import Log, node_lines
from flatout.monitor.fleet.nodes import Fleet
from flatout.monitor.past.history import HistoryTail
from flatout.monitor.sample import Sample
from flatout.monitor.sampler import Sampler
from flatout.monitor.web.run_list import FleetRuns, RunList
from flatout.monitor.web.run_stream import BEAT, RETRY, RunStream, StreamPosition, event

MOST_CLIENTS = 200
MOST_OPEN = 4  # runs side by side
POLL_S = 1.0
LIST_EVERY_POLLS = 5
BEAT_S = 10.0


class Client:
    """One browser: what it shows, and how far it has got."""

    def __init__(self, streams: Sequence[RunStream]) -> None:
        self.streams = tuple(streams)
        self.positions: dict[str, StreamPosition] = {}
        self.sees_runs: bytes = b""
        self.wake = asyncio.Event()

    async def wait(self, longest_s: float) -> None:
        """Wait until there may be something to send, for at most `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self.wake.wait()
        self.wake.clear()


class Feed:
    """Streams of runs, and the browsers that follow them."""

    def __init__(
        self,
        *,
        sampler: Sampler | None = None,
        folders: Sequence[Path] = (),
        root: Path | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.run_list: RunList | FleetRuns = (
            RunList(sampler=sampler, folders=folders, root=root) if fleet is None else FleetRuns(fleet)
        )
        self._list_every = LIST_EVERY_POLLS if fleet is None else 1
        self.clients: set[Client] = set()
        self.streams: dict[str, RunStream] = {}
        self._logs: dict[str, Log] = {}
        self._sampler = sampler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._listed_s = float("-inf")
        self._told: str | None = None  # the run that a fleet asks for
        self._runs = b""
        self._is_closed = False

    # The life of the server

    async def begin(self) -> None:
        """Take the sampler's run so far, and listen to what follows."""
        self._loop = asyncio.get_running_loop()
        self._list_runs()
        sampler, key = self._sampler, self.run_list.own_key
        if sampler is None or key is None:
            return
        folder = sampler.job_folder
        logged = [] if folder is None else await asyncio.to_thread(HistoryTail(folder).past)
        sampler.listeners.append(self.hear)  # first: a sample that comes twice is kept once
        recent = sampler.recent()
        start_s = recent[0].time_s if recent else float("inf")
        stream = RunStream(key, [*(sample for sample in logged if sample.time_s < start_s), *recent])
        self.streams[key] = stream

    def close(self) -> None:
        """End every connection."""
        self._is_closed = True
        if self._sampler is not None and self.hear in self._sampler.listeners:
            self._sampler.listeners.remove(self.hear)
        self._wake()

    def hear(self, sample: Sample) -> None:
        """Take a sample from the sampler's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._add, sample)

    def _add(self, sample: Sample) -> None:
        assert self.run_list.own_key is not None
        self.streams[self.run_list.own_key].extend([sample])
        self._wake()

    async def follow(self) -> None:
        """Poll the logs of other processes while a browser is connected."""
        polls = 0
        while not self._is_closed:
            await asyncio.sleep(POLL_S)
            if not self.clients:
                continue
            polls += 1
            await self.look(lists_runs=polls % self._list_every == 0)

    async def look(self, *, lists_runs: bool = False) -> None:
        """Poll every followed log once, and the list of runs."""
        if lists_runs:
            await self._read_runs()
        for key in list(self._logs):
            await self._read_on(key)

    async def _read_on(self, key: str) -> None:
        """Take in what a log has more."""
        async with self._reading:
            log = self._logs.get(key)
            samples = [] if log is None else await asyncio.to_thread(log.more)
            if samples and key in self.streams:
                self.streams[key].extend(samples)
                self._wake()

    async def _read_runs(self) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.run_list.read)
        self._list_runs()

    def _list_runs(self) -> None:
        listed = self.run_list
        entries = [entry.to_json() for entry in listed.entries]
        document = {
            "runs": entries,
            "unlisted": listed.num_unlisted,
            "first": listed.first,
            "most": MOST_OPEN,
            "folder": str(listed.folder),
        }
        shown = event("runs", document)
        if shown != self._runs:
            self._runs = shown
            self._wake()

    def _wake(self) -> None:
        for client in self.clients:
            client.wake.set()

    # Browsers

    def admit(self) -> Client | None:
        """Take in one browser, until it leaves; None if there are too many."""
        if len(self.clients) >= MOST_CLIENTS:
            return None
        client = Client([])
        self.clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        self.clients.discard(client)
        self._close_unwatched()

    async def events(
        self, keys: Sequence[str], client: Client, *, after_s: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield everything for one browser, until it leaves or the server ends."""
        try:
            if len(self.clients) == 1:  # while nobody looked, nobody looked for runs
                await self._read_runs()
            yield RETRY + self._runs
            client.sees_runs = self._runs
            client.streams = tuple(await self._open(keys or self.run_list.first, client))
            async for chunk in self._backlog(client, after_s):
                yield chunk
            clock = asyncio.get_running_loop().time
            beat_at_s = clock() + BEAT_S
            while not self._is_closed:
                await client.wait(max(beat_at_s - clock(), 0.0))
                chunk = self._news(client) or (BEAT if clock() >= beat_at_s else b"")
                if chunk:
                    yield chunk
                    beat_at_s = clock() + BEAT_S
        finally:
            self.leave(client)

    async def _backlog(self, client: Client, after_s: float | None) -> AsyncIterator[bytes]:
        for stream in client.streams:
            client.positions[stream.key] = stream.position
            yield stream.whole() if after_s is None else stream.again(after_s)
        times = [position.time_s for position in client.positions.values() if position.time_s is not None]
        shown = {"runs": [stream.key for stream in client.streams], "now_s": round(time.time(), 1)}
        yield event("ready", shown, time_s=max(times, default=None))

    def _news(self, client: Client) -> bytes:
        """Return what this browser has not seen."""
        chunks = []
        if client.sees_runs != self._runs:
            client.sees_runs = self._runs
            chunks.append(self._runs)
        for stream in client.streams:
            chunks.append(stream.since(client.positions.get(stream.key)))
            client.positions[stream.key] = stream.position
        return b"".join(chunks)

    async def own_lines(self, after_s: float | None) -> bytes:
        """Return what this page tells a fleet: the run that it opens first, and its samples after a time."""
        if not self.clients and time.monotonic() - self._listed_s >= POLL_S * LIST_EVERY_POLLS:
            self._listed_s = time.monotonic()
            await self._read_runs()
        self._told = next(iter(self.run_list.first), None)
        entry = next((each for each in self.run_list.entries if each.key == self._told), None)
        samples: list[Sample] = []
        for stream in await self._open([] if self._told is None else [self._told], Client([])):
            await self._read_on(stream.key)
            samples = stream.after(float("-inf") if after_s is None else after_s)
        return node_lines(socket.gethostname(), None if entry is None else entry.run, samples)

    async def _open(self, keys: Sequence[str], client: Client) -> list[RunStream]:
        """Open the streams of some runs; read those that nobody has open from their logs."""
        opened: list[RunStream] = []
        for key in list(dict.fromkeys(keys))[:MOST_OPEN]:
            async with self._opening:  # of browsers that ask at once, the first reads for all
                if key not in self.streams and (log := self.run_list.log_of(key)) is not None:
                    self.streams[key] = RunStream(key, await asyncio.to_thread(log.past))
                    self._logs[key] = log
                if key in self.streams:
                    opened.append(self.streams[key])
                    client.streams = tuple(opened)  # so that it stays open while the others are read
        return opened

    def _close_unwatched(self) -> None:
        watched = {stream.key for client in self.clients for stream in client.streams} | {self._told}
        for key in self._logs.keys() - watched:
            del self._logs[key], self.streams[key]
