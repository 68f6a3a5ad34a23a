"""What a dashboard page is fed where no GPU is at hand, and a browser's side of its server-sent events."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from flatout.ground.runs import Run, create_run
from flatout.monitor.past.history import HistoryWriter
from flatout.monitor.sample import GpuSample, HostSample, JobSample, ProcessSample, Sample

# Samples of runs that are made up: what a page is fed where no GPU is at hand

GIB = 2**30
START_S = 1_700_000_000.0
HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>\u202e\n'\"`"


def wave(second: float, *, period_s: float, low: float, high: float) -> float:
    """Some unrest, the same in every run of a test."""
    slow = math.sin(second / period_s / 4 * math.tau) + 0.5 * math.sin(second / period_s * 1.37 * math.tau)
    noise = random.Random(f"{second} {period_s}").uniform(-1.2, 1.2)
    return low + (high - low) * (slow + noise + 2.7) / 5.4


def gpu(second: float, *, index: int = 0, busy: float = 0.6) -> GpuSample:
    shift = second + 7.0 * index
    return GpuSample(
        index=index,
        name="NVIDIA H200",
        uuid=f"GPU-0000000{index}-bb37-74c5-28e6-909b2c7e2234",
        utilisation_share=wave(shift, period_s=23, low=busy - 0.12, high=min(busy + 0.12, 1.0)),
        sm_active_share=wave(shift, period_s=19, low=busy * 0.5, high=busy * 0.8),
        memory_used_bytes=int((61 + index + 0.4 * math.sin(shift / 9)) * GIB),
        memory_total_bytes=140 * GIB,
        power_w=wave(shift, period_s=31, low=300 * busy + 90, high=480 * busy + 120),
        power_limit_w=700.0,
        temperature_c=wave(shift, period_s=120, low=48, high=57),
        sm_clock_hz=1.965e9,
        sm_clock_max_hz=1.98e9,
        throttle_reasons=(),
        pcie_received_bytes_per_s=wave(shift, period_s=13, low=2e8, high=6e8),
        pcie_sent_bytes_per_s=wave(shift, period_s=17, low=1e7, high=4e7),
    )


def sample(
    second: float,
    *,
    num_gpus: int = 1,
    busy: float = 0.6,
    wait: float = 0.38,
    steps_per_s: float = 6.0,
    name: str = "train",
    notes: tuple[str, ...] = (),
) -> Sample:
    waited = wave(second, period_s=29, low=wait * 0.9, high=wait * 1.1)
    rest = 1.0 - waited
    phases = {
        "wait": waited,
        "transfer": 0.03 * rest,
        "forward": 0.31 * rest,
        "backward": 0.52 * rest,
        "optimizer": 0.1 * rest,
        "rest": 0.04 * rest,
    }
    rate = wave(second, period_s=41, low=0.93 * steps_per_s, high=1.07 * steps_per_s)
    return Sample(
        time_s=START_S + second,
        span_s=1.0,
        host=HostSample(
            cpu_share=wave(second, period_s=27, low=0.3, high=0.5),
            cores=32.0,
            memory_used_bytes=int((88 + 3 * math.sin(second / 50)) * GIB),
            memory_total_bytes=256 * GIB,
            disk_read_bytes_per_s=wave(second, period_s=11, low=2e7, high=9e7),
            disk_write_bytes_per_s=1.2e5,
            network_received_bytes_per_s=4.1e4,
            network_sent_bytes_per_s=2.2e4,
        ),
        gpus=tuple(gpu(second, index=index, busy=busy) for index in range(num_gpus)),
        processes=tuple(
            ProcessSample(
                pid=4711 + index,
                gpu_index=index,
                name="python3 train.py",
                of_job=True,
                gpu_memory_bytes=(58 + index) * GIB,
                cpu_cores=wave(second + index, period_s=15, low=1.0, high=1.4),
                memory_bytes=9 * GIB,
            )
            for index in range(num_gpus)
        ),
        job=JobSample(
            pid=4711,
            name=name,
            steps=int(second * steps_per_s),
            samples=int(second * steps_per_s) * 512,
            step_s=1 / rate,
            steps_per_s=rate,
            samples_per_s=rate * 512,
            since_step_s=0.1,
            phases=phases,
            device_phases=phases,
            loss=0.4
            + 2.6 * math.exp(-(second + 20) * steps_per_s / 960)
            + random.Random(second).uniform(-0.03, 0.03),
            learning_rate=5.2e-05,
            allocated_bytes=int((41 + 0.2 * math.sin(second / 7)) * GIB),
            reserved_bytes=57 * GIB,
            gpu_index=0,
            visible_gpus=tuple(range(num_gpus)),
            energy_per_step_j=71.0,
            energy_per_sample_j=0.139,
        ),
        notes=notes,
    )


def run(
    name: str = "train", *, pid: int | None = None, ended_s: float | None = None, host: str | None = None
) -> Run:
    return Run(
        name=name,
        pid=os.getpid() if pid is None else pid,
        process_started_s=None,
        started_s=START_S,
        ended_s=ended_s,
        host=host,
    )


def logged_run(
    root: Path,
    samples: Iterable[Sample],
    *,
    name: str = "train",
    pid: int | None = None,
    host: str | None = None,
) -> Path:
    """A run's folder with its log."""
    folder = create_run(run(name, pid=pid, host=host), root)
    writer = HistoryWriter(folder)
    for each in samples:
        writer(each)
    writer.close()
    return folder


# A browser's side of the server-sent events, over a plain socket


@dataclass
class Answer:
    """The status and the headers of an answer, and its body where it was read."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Event:
    """One event of the stream."""

    name: str
    data: Any
    identity: str | None = None


def connect(
    url: str, path: str, *, host: str | None = None, headers: dict[str, str] | None = None
) -> socket.socket:
    """A connection on which a request was sent."""
    address = urlsplit(url)
    connection = socket.socket()
    connection.settimeout(60)
    # Small, so that what is not read stays with the server: the kernel would keep megabytes of it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", address.port or 80))
    sent = {"Host": host or f"127.0.0.1:{address.port}", "Connection": "close"} | (headers or {})
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value), "", ""]
    connection.sendall("\r\n".join(lines).encode("latin-1"))
    return connection


def fetch(url: str, path: str = "", *, host: str | None = None, **headers: str) -> Answer:
    """One whole answer; `path` is relative to the page's address unless it begins with a slash."""
    whole = path if path.startswith("/") else urlsplit(url).path + path
    with connect(url, whole, host=host, headers=headers) as connection, connection.makefile("rb") as stream:
        answer = _head(stream)
        answer.body = stream.read()
        return answer


def _head(stream: Any) -> Answer:
    status = int(stream.readline().split()[1])
    headers = {}
    while line := stream.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Answer(status, headers)


@dataclass
class Listener:
    """Reads the events of a page; `last_id` is what a browser would send back."""

    url: str
    query: str = ""
    last_id: str | None = None
    answer: Answer = field(init=False)

    def __enter__(self) -> Listener:
        headers = {} if self.last_id is None else {"Last-Event-ID": self.last_id}
        self.socket = connect(self.url, f"{urlsplit(self.url).path}events{self.query}", headers=headers)
        self._stream = self.socket.makefile("rb")
        self.answer = _head(self._stream)
        self._lines = self._body_lines()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self.socket.close()

    def _body_lines(self) -> Iterator[str]:
        """The lines of a body in chunks."""
        rest = b""
        while size := int(self._stream.readline() or b"0", 16):
            *lines, rest = (rest + self._stream.read(size)).split(b"\n")
            self._stream.readline()
            yield from (line.decode() for line in lines)

    def events(self) -> Iterator[Event]:
        """Events until the server ends the stream."""
        found: dict[str, str] = {}
        for line in self._lines:
            if line:
                name, _, value = line.partition(": ")
                found[name] = value
            elif "event" in found:
                identity = found.get("id")
                self.last_id = identity or self.last_id
                yield Event(found["event"], json.loads(found["data"]), identity)
                found = {}

    def until(self, name: str) -> list[Event]:
        """Events up to and with the first of that name."""
        heard = []
        for event in self.events():
            heard.append(event)
            if event.name == name:
                return heard
        raise AssertionError(f"the stream ended before {name!r}; heard {[event.name for event in heard]}")
