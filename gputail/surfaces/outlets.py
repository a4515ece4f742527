"""The surfaces of a daemon together: request records, metrics and the control socket, each open or off, exchanged while it runs.

In come records and snapshots, which are handed to those that are open. What each shows is its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from gputail import __version__, events
from gputail.config import DEFAULT_SOCKET, Address, Settings
from gputail.errors import GputailError
from gputail.journal import ERROR, WARNING, say
from gputail.snapshot import Snapshot
from gputail.surfaces.control import ControlServer
from gputail.surfaces.jsonl import BackgroundWriter, JsonlWriter
from gputail.surfaces.metrics import SnapshotCollector
from gputail.surfaces.metrics_access import Access
from gputail.surfaces.metrics_server import MetricsServer
from gputail.surfaces.otlp import OtlpExporter
from gputail.tail import RequestRecord

NAMES = ("jsonl", "socket", "listen", "otlp")  # of the settings that say where


class Outlets:
    """Open until closed. GputailError where one cannot be opened."""

    def __init__(self, settings: Settings) -> None:
        self._start_ns = time.monotonic_ns()
        self._lines: BackgroundWriter | None = None
        self._control: ControlServer | None = None
        self._server: MetricsServer | None = None
        self._otlp: OtlpExporter | None = None
        self._otlp_spans = settings.otlp_spans
        self._collector = SnapshotCollector(settings.max_workloads)
        self._access = Access(settings)
        self._latest: Snapshot | None = None
        self._lost = dict.fromkeys(events.OUTLET_STAGES, 0)  # records, by writers that are closed
        self._is_stuck = False
        try:
            for name in NAMES:
                self._open(name, getattr(settings, name))
        except BaseException:
            self.close()
            raise

    @property
    def want_snapshots(self) -> bool:
        return any(one is not None for one in (self._server, self._control, self._otlp))

    def hand_on(self, records: Sequence[RequestRecord]) -> None:
        if self._lines:
            self._lines.write(records)
        if self._control:
            self._control.offer(records)
        if self._otlp:
            self._otlp.offer(records)

    def publish(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        if self._server or self._otlp:
            self._collector.publish(snapshot)
        if self._control:
            self._control.publish(snapshot)

    def with_losses(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what was lost on its way out, too."""
        now = {"jsonl": self._lines.lost if self._lines else 0, "otlp": self._otlp.lost if self._otlp else 0}
        lost = {stage: before + now[stage] for stage, before in self._lost.items() if before + now[stage]}
        return replace(snapshot, lost={**snapshot.lost, **lost}) if lost else snapshot

    def change(self, name: str, old: object, new: object) -> None:
        """Close one and open it elsewhere (None: not at all). GputailError where that cannot be; then it is what it was."""
        self._close(name)
        try:
            self._open(name, new)
        except GputailError:
            with suppress(GputailError):
                self._open(name, old)
            raise

    def close(self) -> None:
        """Take leave of every reader. Ends the process where a reader that has stopped reading would keep it from that."""
        for name in reversed(NAMES):
            self._close(name)
        if self._is_stuck:
            os._exit(1)  # a thread that hangs in a write to stdout would make Python hang at its exit

    def _open(self, name: str, where: object) -> None:
        if name == "jsonl" and isinstance(where, str):
            self._lines = BackgroundWriter(JsonlWriter(where, append=True))
        elif name == "socket" and isinstance(where, str):
            self._control = self._control_server(where)
            if self._control and self._latest:
                self._control.publish(self._latest)
        elif name == "listen" and isinstance(where, Address):
            if self._latest:
                self._collector.publish(self._latest)
            self._server = MetricsServer(where, self._collector, self._access)
            say(f"metrics on {self._access.scheme}://{self._server.address}/metrics")
        elif name == "otlp" and isinstance(where, str):
            if self._latest:
                self._collector.publish(self._latest)
            self._otlp = OtlpExporter(where, self._otlp_spans, self._collector)
            say(f"OTLP to {where}")

    def _control_server(self, path: str) -> ControlServer | None:
        """Serves there. Where nobody asked for the socket in so many words, a second daemon goes on without one and says so."""
        try:
            return ControlServer(path, {"pid": os.getpid(), "version": __version__, "start_ns": self._start_ns})
        except GputailError as error:
            if path != DEFAULT_SOCKET:
                raise
            say(f"no control socket: {error.problem}", WARNING)
            return None

    def _close(self, name: str) -> None:
        if name == "jsonl" and self._lines:
            lines, self._lines = self._lines, None
            if not lines.close():
                say("not all request records were written: what reads them has stopped reading", ERROR)
                self._is_stuck = True
            self._lost["jsonl"] += lines.lost
        elif name == "socket" and self._control:
            control, self._control = self._control, None
            control.close()
        elif name == "listen" and self._server:
            server, self._server = self._server, None
            server.close()
        elif name == "otlp" and self._otlp:
            otlp, self._otlp = self._otlp, None
            otlp.close()
            self._lost["otlp"] += otlp.lost
