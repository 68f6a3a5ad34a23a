"""Who may read the page, and what a browser may do with it.

On loopback, every user of this machine may read.  Beyond loopback the address begins with a random token,
`http://host:port/TOKEN/`: as a part of the path it is carried along by every relative address of the page,
needs no cookie, and is in no log of ours.

A page of another site can point its own name at 127.0.0.1 and so make a browser read this server for it
(DNS rebinding).  Such a request carries that site's name in its Host header, and is refused: only an
address, or a name of this machine, can be what the user typed.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

TOKEN_BYTES = 24
# The page runs its own script and nothing else; even a defect in its own code cannot turn text into markup.
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server bound to `host`."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


class Guard:
    """Wraps an ASGI application: refuses strangers, strips the token, adds the headers."""

    def __init__(self, app: App, *, host: str, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._is_local = is_loopback(host)
        name = socket.gethostname().lower()
        self._names = {"localhost"} if self._is_local else {"localhost", host.lower(), name, f"{name}.local"}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in own]
                message = {**message, "headers": [*kept, *HEADERS]}
            await send(message)

        refusal = self._wrong_host(scope["headers"])
        path = None if refusal else self._without_token(scope["path"])
        if refusal or path is None:
            await _refuse(
                send_with_headers, refusal or "this address needs its token: open the printed address"
            )
            return
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send_with_headers)

    def _wrong_host(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) == 1 and self.is_known(hosts[0]):
            return None
        return "this is not a name of this machine: open its address instead, such as http://127.0.0.1"

    def is_known(self, host: str) -> bool:
        """Return whether the user can have typed this Host; its port may belong to a tunnel."""
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        address = _address(name or "")
        if address is None:
            return name in self._names
        return address.is_loopback or not self._is_local

    def _without_token(self, path: str) -> str | None:
        """Return the path after the token; None if the token is missing or wrong."""
        if self._token is None:
            return path
        given, slash, rest = path.removeprefix("/").partition("/")
        # Equal times for all wrong tokens: their first letters must not be found one by one.
        is_right = secrets.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)
        return f"/{rest}" if is_right and slash else None


async def _refuse(send: Send, sentence: str) -> None:
    body = f"{sentence}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
