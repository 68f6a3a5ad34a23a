"""The page's server: starlette and uvicorn in a separate thread of the process.

    GET /              the page          GET /static/NAME   its files, from a list made at the start
    GET /events        its data          GET /rules/FO101   a rule of the doctor
    GET /metrics       the sampler's last sample in Prometheus's format
    GET /samples       the samples of the run that the page opens first, for the page of a fleet

Nothing is written by a request, so there is nothing to forge.  uvicorn's access log is off: it would hold the
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.doctor.rule import rule_by_code
from flatout.ground.errors import BadInput, FlatoutError, import_extra
from flatout.monitor.sampler import Sampler
from flatout.monitor.sinks.prometheus import CONTENT_TYPE, exposition
from flatout.monitor.web import connections
from flatout.monitor.web.access import Guard, is_loopback, new_token
from flatout.monitor.web.feed import Feed
from flatout.monitor.web.rule_page import rule_page
from flatout.monitor.web.run_stream import time_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
HIGHEST_PORT = 65535
LAST_WORDS_S = 0.3  # for browsers to take the end of their stream, before the connection is cut


def application(feed: Feed, *, sampler: Sampler | None = None) -> Any:
    """Make the ASGI application, without the guard."""
    applications = import_extra("starlette.applications", extra="web")
    responses = import_extra("starlette.responses", extra="web")
    routing = import_extra("starlette.routing", extra="web")
    files = static_files()

    def file(name: str) -> Response:
        kind = KINDS.get(Path(name).suffix)
        if name not in files or kind is None:
            return refuse(f"no file {name!r}", status=404)
        return responses.Response(files[name], media_type=kind)  # type: ignore[no-any-return]

    def refuse(sentence: str, *, status: int) -> Response:
        return responses.PlainTextResponse(f"{sentence}\n", status_code=status)  # type: ignore[no-any-return]

    async def static(request: Request) -> Response:
        return file(request.path_params.get("name", "index.html"))

    class Events(responses.StreamingResponse):  # type: ignore[name-defined,misc]
        """Frees the browser's place however the answer ends."""

        async def __call__(self, *channel: Any) -> None:
            try:
                await super().__call__(*channel)
            finally:
                feed.leave(self.client)

    async def events(request: Request) -> Response:
        client = feed.admit()
        if client is None:
            return refuse(f"{len(feed.clients)} browsers are already connected", status=503)
        last = request.headers.get("last-event-id") or request.query_params.get("since")
        stream = feed.events(request.query_params.getlist("run"), client, after_s=time_of(last))
        answer = Events(stream, media_type="text/event-stream")
        answer.client = client
        return answer

    async def rule(request: Request) -> Response:
        try:
            found = rule_by_code(request.path_params["code"])
        except BadInput as error:
            return refuse(str(error), status=404)
        return responses.HTMLResponse(rule_page(found))  # type: ignore[no-any-return]

    async def metrics(request: Request) -> Response:
        text = exposition(getattr(sampler, "latest", None))
        return responses.Response(text, headers={"content-type": CONTENT_TYPE})  # type: ignore[no-any-return]

    async def samples(request: Request) -> Response:
        lines = await feed.own_lines(time_of(request.query_params.get("after")))
        return responses.Response(lines, media_type="application/jsonl")  # type: ignore[no-any-return]

    paths = {
        "/": static,
        "/static/{name}": static,
        "/events": events,
        "/rules/{code}": rule,
        "/metrics": metrics,
        "/samples": samples,
    }
    app = applications.Starlette(
        routes=[routing.Route(path, answer, methods=["GET"]) for path, answer in paths.items()]
    )
    app.router.redirect_slashes = False  # it would answer with an address without the token
    return app


def static_files() -> dict[str, bytes]:
    """Read every file of the page by its name; its style begins with the colours that all pages share."""
    own = resources.files("flatout.monitor.web").joinpath("static")
    folders = (own, own.joinpath("uplot"))
    files = {
        file.name: file.read_bytes() for folder in folders for file in folder.iterdir() if file.is_file()
    }
    colours = resources.files("flatout.page").joinpath("tokens.css").read_bytes()
    return {**files, "page.css": colours + files["page.css"]}


class PageServer:
    """The page of a sampler, of run folders, or of both, while the `with` block runs.

    What it shows is given as to a `Feed`.
    """

    def __init__(
        self,
        *,
        sampler: Sampler | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bool = False,
        **shown: Any,
    ) -> None:
        self.token = new_token() if token or not is_loopback(host) else None
        self.feed = Feed(sampler=sampler, **shown)
        uvicorn = import_extra("uvicorn", extra="web")
        h11 = import_extra("uvicorn.protocols.http.h11_impl", extra="web")

        class Connection(h11.H11Protocol):  # type: ignore[name-defined,misc]
            def connection_made(connection, transport: Any) -> None:  # noqa: N805
                super().connection_made(transport)
                self._sweep.arrived(connection, time.monotonic())

        self._host = host
        self._server = uvicorn.Server(
            uvicorn.Config(
                Guard(application(self.feed, sampler=sampler), host=host, token=self.token),
                http=Connection,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=connections.MOST,
            )
        )
        self._sweep = connections.Sweep(self._server.server_state.connections)
        self.port = port
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatout-page", daemon=True)

    @property
    def url(self) -> str:
        """The address to open, once the server is started."""
        everywhere = self._host in ("", "0.0.0.0", "::")
        host = socket.gethostname() if everywhere else self._host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"{self.token}/" if self.token is not None else "")

    def start(self) -> PageServer:
        self._socket = _listen(self._host, self.port)
        self.port = self._socket.getsockname()[1]
        self._thread.start()
        self._is_ready.wait()
        self._raise_failure()
        return self

    def stop(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended in between
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join()

    def wait(self) -> None:
        """Wait until the server ends: by `stop`, an interrupt or a defect."""
        self._thread.join()
        self._raise_failure()

    def __enter__(self) -> PageServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise FlatoutError(f"the page's server ended: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except (OSError, RuntimeError, ValueError) as error:
            self._failure = error
        finally:
            self._is_ready.set()
            if self._socket is not None:
                self._socket.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.feed.begin()
        tasks = [asyncio.create_task(self.feed.follow()), asyncio.create_task(self._keep_sweeping())]
        # The socket listens already: whoever connects before uvicorn accepts is served then.
        self._is_ready.set()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for task in tasks:
                task.cancel()
            self.feed.close()

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(connections.SWEEP_EVERY_S)
            self._sweep(time.monotonic())

    def _end(self) -> None:
        self.feed.close()
        self._server.should_exit = True
        assert self._loop is not None
        self._loop.call_later(LAST_WORDS_S, self._cut)

    def _cut(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def serve(*, on_ready: Callable[[str], None] | None = None, **options: Any) -> None:
    """Serve the page until KeyboardInterrupt; call `on_ready` with its address.

    `options` are those of a `PageServer`; a sampler has been started.  Beyond loopback the address holds a
    token in any case.
    """
    with PageServer(**options) as page:
        if on_ready is not None:
            on_ready(page.url)
        page.wait()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= HIGHEST_PORT:
        raise BadInput(
            f"there is no port {port}", hint=f"choose one up to {HIGHEST_PORT}; 0 takes a free one"
        )
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise BadInput(
            f"the page cannot be served at {host or 'all addresses'}, port {port}: {error}",
            hint="give --host an address of this machine; 0.0.0.0 means all of them"
            if is_elsewhere
            else "choose another --port; 0 takes a free one",
        ) from None
