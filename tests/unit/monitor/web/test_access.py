"""Strangers are refused: those with another name in their request, and those without the token."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.monitor.web.access import HEADERS, Guard, Message, is_loopback, new_token

TOKEN = "a-token_of-letters"


async def answering(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    headers = [(b"cache-control", b"public"), (b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def ask(
    path: str = "/",
    *,
    hosts: tuple[str, ...] = ("127.0.0.1:80",),
    bound: str = "127.0.0.1",
    token: str | None = None,
) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    scope = {"type": "http", "path": path, "headers": [(b"host", host.encode()) for host in hosts]}
    asyncio.run(Guard(answering, host=bound, token=token)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], sent[0]["headers"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.0.7", False),
        ("gpu-box", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "LocalHost:9000", "[::1]:8080", "127.0.0.9"])
def test_names_of_loopback_are_answered_at_any_port(host: str) -> None:
    assert ask(hosts=(host,))[:2] == (200, b"/")


@pytest.mark.parametrize(
    "hosts",
    [
        ("evil.example",),
        ("127.0.0.1.evil.example",),
        ("localhost.evil.example",),
        ("192.168.0.7",),
        ("evil.example:80@127.0.0.1.nip.io",),
        ("[::1",),
        ("",),
        (),
        ("127.0.0.1", "evil.example"),
    ],
)
def test_other_names_are_refused(hosts: tuple[str, ...]) -> None:
    status, body, _ = ask(hosts=hosts)
    assert status == 403
    assert b"127.0.0.1" in body


@pytest.mark.parametrize(
    ("host", "status"), [("192.168.0.7:80", 200), ("gpu-box", 200), ("[fd00::7]", 200), ("evil.example", 403)]
)
def test_beyond_loopback_addresses_and_own_names_are_known(host: str, status: int) -> None:
    assert ask(f"/{TOKEN}/", hosts=(host,), bound="gpu-box", token=TOKEN)[0] == status


@pytest.mark.parametrize(
    "path", ["/", "/events", f"/{TOKEN}", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "//", f"/x/{TOKEN}/", "/\udcff/"]
)
def test_without_the_token_nothing_is_answered(path: str) -> None:
    status, body, _ = ask(path, token=TOKEN)
    assert status == 403
    assert TOKEN.encode() not in body


def test_the_token_is_taken_off_the_path() -> None:
    assert ask(f"/{TOKEN}/", token=TOKEN)[:2] == (200, b"/")
    assert ask(f"/{TOKEN}/static/page.js", token=TOKEN)[:2] == (200, b"/static/page.js")


@given(st.text(max_size=40))
def test_no_other_token_is_taken(given: str) -> None:
    path = f"/{given}/"
    assert (ask(path, token=TOKEN)[0] == 200) == (given.partition("/")[0] == TOKEN)


def test_tokens_differ_and_fit_an_address() -> None:
    tokens = {new_token() for _ in range(50)}
    assert len(tokens) == 50
    assert all(len(token) >= 32 and token.replace("-", "").replace("_", "").isalnum() for token in tokens)


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("evil.example",)])
def test_every_answer_carries_the_headers_once(hosts: tuple[str, ...]) -> None:
    headers = ask(hosts=hosts)[2]
    for pair in HEADERS:
        assert [value for name, value in headers if name == pair[0]] == [pair[1]]
