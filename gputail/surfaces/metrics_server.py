"""The server of Prometheus metrics: a collector's families over HTTP or HTTPS, each scrape on a thread of its own.

In comes a request, out goes text: prometheus_client chooses between Prometheus' format and OpenMetrics by what the scraper accepts.
What the metrics are is left to metrics.py, who may have them to metrics_access.py.
"""

from __future__ import annotations

import errno
import gzip
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gputail.config import Address
from gputail.errors import GputailError
from gputail.surfaces.metrics_access import Access

SCRAPE_TIMEOUT_S = 10
OPENMETRICS = "application/openmetrics-text"

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _WithoutEmptyBuckets(Collector):
    """A collector's families, of histograms without the buckets below the last empty one.

    A bucket that is not there adds as much to a sum over workloads or nodes as one that is 0. Those above the longest request must
    stay: they hold the count of all.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            if family.type == "histogram":
                pairs = zip_longest(family.samples, family.samples[1:])
                family.samples = [sample for sample, after in pairs if not _is_idle(sample, after)]
            yield family


def _is_idle(sample: Sample, after: Sample | None) -> bool:
    return sample.value == 0 and after is not None and after.value == 0 and "le" in sample.labels and "le" in after.labels


def _application(registry: CollectorRegistry, access: Access) -> Application:
    serve: Application = make_wsgi_app(registry, disable_compression=True)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not access.allows(environ.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="gputail", charset="UTF-8"')])
            return [b"name and password are needed\n"]
        # The names of our metrics are plain whichever escaping is asked for. With this one prometheus_client does not look at every
        # character of each, which takes half as long again.
        if OPENMETRICS in environ.get("HTTP_ACCEPT", ""):
            environ["HTTP_ACCEPT"] = f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8"
        if "gzip" not in environ.get("HTTP_ACCEPT_ENCODING", ""):
            return serve(environ, start_response)

        def start_packed(status: str, headers: list[tuple[str, str]]) -> Any:
            return start_response(status, [*headers, ("Content-Encoding", "gzip")])

        # At this level, since any other takes ten times as long and saves a scrape some kilobytes.
        return [gzip.compress(part, 1) for part in serve(environ, start_packed)]

    return application


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S  # a client that stalls is let go

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    access: Access

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for our name and may wait for it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the thread of this connection, so that whoever stalls in the handshake delays nobody."""
        request.settimeout(SCRAPE_TIMEOUT_S)
        with self.access.wrap(request) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that went away is no news."""


def registry(collector: Collector) -> CollectorRegistry:
    """All that a scrape is answered with: what the collector has, and what this process takes."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_WithoutEmptyBuckets(collector))
    ProcessCollector(registry=made)
    return made


class MetricsServer:
    """Serves a collector over HTTP, or HTTPS, to those that have access. Raises GputailError where it cannot listen."""

    def __init__(self, address: Address, collector: Collector, access: Access) -> None:
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            server_class = type("Server", (_Server,), {"address_family": family, "access": access})
            self._server = server_class((address.host, address.port), _Handler)
        except (OSError, UnicodeError) as error:
            raise _cannot_listen(address, error) from error
        self._server.set_app(_application(registry(collector), access))
        self.address = Address(address.host, self._server.server_port)  # port 0 has become a real one
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, within 0.2 s. A scrape that is still being written out is not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _cannot_listen(address: Address, error: OSError | UnicodeError) -> GputailError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    problem = f"cannot serve metrics on {address}: {reason.lower()}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        other = Address(address.host, address.port + 1 if address.port < 65535 else address.port - 1)
        return GputailError(problem, f"is gputail running already? else give --listen {other}, or --listen off")
    return GputailError(problem, "choose another address with --listen HOST:PORT, or --listen off")
