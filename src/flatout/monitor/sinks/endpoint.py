"""`/metrics` on the loopback interface: the last sample, for a Prometheus on this machine to scrape.

Nothing is sent to anybody: it answers whoever asks from this machine, and refuses requests that a web page
of another site could make the browser send (their Host header names that site).
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flatout.errors import BadInput
from flatout.monitor.sample import Sample
from flatout.monitor.sinks.prometheus import CONTENT_TYPE, Prometheus

ADDRESS = "127.0.0.1"
OWN_NAMES = (ADDRESS, "localhost")
PATH = "/metrics"


class MetricsEndpoint:
    """A sink that serves what it was given last; port 0 takes any that is free."""

    def __init__(self, port: int) -> None:
        self._sink = Prometheus()
        try:
            self._server = _Server((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise BadInput(
                f"port {port} of {ADDRESS} cannot be served: {error}", hint="choose another, or 0 for any"
            ) from None
        self._server.sink = self._sink
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="flatout-metrics", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}{PATH}"

    def __call__(self, sample: Sample) -> None:
        self._sink(sample)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    sink: Prometheus


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # of a client that connects and says nothing

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in OWN_NAMES:
            self.send_error(403)
        elif self.path.partition("?")[0] != PATH:
            self.send_error(404)
        else:
            body = self.server.sink.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """A scrape is no news."""
