"""A browser's side of the server-sent events, over a plain socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


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
