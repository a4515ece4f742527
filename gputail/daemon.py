"""`run` and `record`: the tracer, the analysis and the surfaces wired together, from start to SIGTERM.

The one module that knows all stages. A tick is one drain of the rings; everything else happens between two drains,
and nothing that a reader does can delay them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from gputail import __version__
from gputail.capture import CaptureWriter
from gputail.config import AUTO, DEFAULT_SOCKET, Settings
from gputail.effective import Effective
from gputail.errors import GputailError
from gputail.events import Batch
from gputail.pipeline import Pipeline
from gputail.probes.launch import HeldCommand
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.snapshot import Health, Snapshot
from gputail.surfaces.control import ControlServer
from gputail.surfaces.jsonl import BackgroundWriter, JsonlWriter
from gputail.surfaces.metrics import MetricsServer, SnapshotCollector
from gputail.tiers import FULL, TIERS

SNAPSHOT_S = 0.5  # how often surfaces get a new view


class _Stage(Protocol):
    """What is done with each batch."""

    def feed(self, batch: Batch) -> None: ...

    def finish(self) -> None: ...


class _Until:
    """Why and when tracing ends: a signal, the time asked for, or the end of the command."""

    def __init__(self, settings: Settings, command: HeldCommand | None) -> None:
        self._deadline = time.monotonic() + settings.duration_s if settings.duration_s else None
        self._command = command
        self.is_stopped = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopped:  # asked twice: at once, whatever is lost
            os._exit(128 + number)
        self.is_stopped = True

    def reached(self) -> bool:
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return self.is_stopped or over or (self._command is not None and self._command.has_ended())


def trace_options(settings: Settings, also: int | None = None) -> TraceOptions:
    """What the settings ask the tracer for; `also` is the pid of the command that was started."""
    pids = frozenset(settings.pids) | (frozenset([also]) if also else frozenset())
    is_fixed = settings.tier != AUTO
    return TraceOptions(
        pids=pids,
        libraries=settings.libraries,
        flush_s=settings.flush_ms / 1000,
        tier=TIERS.index(settings.tier) if is_fixed else FULL,
        budget=None if is_fixed else settings.budget_percent / 100,
    )


def run(configuration: Effective) -> int:
    """Trace, analyse, and serve what is found until told to end; the exit status."""
    for doubt in configuration.doubts:
        _say(doubt)
    if configuration.file:
        _say(f"configuration: {configuration.file}")
    settings = configuration.settings
    return _trace(settings, lambda stack, tracer: _Analysis(settings, stack, tracer))


def record(settings: Settings) -> int:
    """Write what the probes see to a file until told to end; the exit status."""
    return _trace(settings, lambda stack, tracer: _Recording(settings, stack))


def _trace(settings: Settings, make_stage: Callable[[ExitStack, Tracer], _Stage]) -> int:
    with ExitStack() as stack:
        command = HeldCommand(settings.command) if settings.command else None
        if command:
            stack.callback(command.stop)
        until = _Until(settings, command)
        tracer = Tracer(trace_options(settings, command.pid if command else None))
        stack.callback(tracer.close)
        stage = make_stage(stack, tracer)
        _say_what_is_traced(tracer)
        if command:
            command.start()
        while not until.reached():
            stage.feed(tracer.poll())
        stage.feed(tracer.finish())
        stage.finish()
        if command and command.status:
            _say(f"{settings.command[0]} ended with status {command.status}")
    return 0


class _Analysis:
    """Batches into request records on the JSON lines surface, and both on the control socket; snapshots on the metrics surface."""

    def __init__(self, settings: Settings, stack: ExitStack, tracer: Tracer) -> None:
        self._tracer = tracer
        self._pipeline = Pipeline()
        self._lines = BackgroundWriter(JsonlWriter(settings.jsonl, append=True)) if settings.jsonl else None
        if self._lines:
            stack.callback(self._close_lines)
        self._next_snapshot = 0.0
        self._collector = SnapshotCollector() if settings.listen else None
        self._control: ControlServer | None = None
        if settings.socket:
            self._control = _control_server(settings.socket)
        if self._control:
            stack.callback(self._control.close)
        self._publish()
        if self._collector and settings.listen:
            server = MetricsServer(settings.listen, self._collector)
            stack.callback(server.close)
            _say(f"metrics on http://{server.address}/metrics")

    def feed(self, batch: Batch) -> None:
        self._pipeline.feed(batch)
        self._hand_on()
        if time.monotonic() >= self._next_snapshot:
            self._publish()

    def finish(self) -> None:
        self._pipeline.finish()
        self._hand_on()
        self._publish()
        snapshot = self._with_losses(self._pipeline.snapshot())
        requests = sum(workload.requests for workload in snapshot.workloads)
        _say(f"{snapshot.events} events, {requests} requests; lost: {_lost_text(snapshot.lost)}")
        ratio = self._tracer.health().overhead_ratio
        if ratio is not None:
            _say(f"tracing took about {100 * ratio:.2g}% of the CPU time of what was traced, last")

    def _close_lines(self) -> None:
        assert self._lines
        if not self._lines.close():
            _say("not all request records were written: what reads them has stopped reading")
            os._exit(1)  # a thread that hangs in a write to stdout would make Python hang at its exit

    def _with_losses(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what was lost on its way out, too."""
        if not self._lines or not self._lines.lost:
            return snapshot
        return replace(snapshot, lost={**snapshot.lost, "jsonl": self._lines.lost})

    def _hand_on(self) -> None:
        records = self._pipeline.take_records()
        for pid in {record.pid for record in records if record.outlier}:
            self._tracer.arm(pid)
        if self._lines:
            self._lines.write(records)
        if self._control:
            self._control.offer(records)

    def _publish(self) -> None:
        self._next_snapshot = time.monotonic() + SNAPSHOT_S
        if not self._collector and not self._control:
            return
        traced = self._tracer.health()
        health = Health(
            attached_functions=traced.functions,
            attached_libraries=traced.libraries,
            unattached=traced.unattached,
            traced_processes=traced.processes,
            overhead_ratio=traced.overhead_ratio,
            processes=traced.costs,
            cpu_s=time.process_time(),
            resident_bytes=_resident_bytes(),
        )
        snapshot = self._with_losses(self._pipeline.snapshot(health))
        if self._collector:
            self._collector.publish(snapshot)
        if self._control:
            self._control.publish(snapshot)


def _control_server(path: str) -> ControlServer | None:
    """Serves there. Where nobody asked for the socket in so many words, a second daemon goes on without one and says so."""
    try:
        return ControlServer(path, {"pid": os.getpid(), "version": __version__, "start_ns": time.monotonic_ns()})
    except GputailError as error:
        if path != DEFAULT_SOCKET:
            raise
        _say(f"no control socket: {error.problem}")
        return None


class _Recording:
    """Batches into a capture file."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        assert settings.output is not None
        self._path = settings.output
        self._writer = CaptureWriter(settings.output)
        stack.callback(self._writer.close)
        self._calls = 0
        self._lost: Counter[str] = Counter()

    def feed(self, batch: Batch) -> None:
        self._writer.write(batch)
        self._calls += len(batch.calls)
        self._lost.update(batch.lost)

    def finish(self) -> None:
        self._writer.close()
        _say(f"{self._calls} events recorded in {self._path}; lost: {_lost_text(self._lost)}")


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _lost_text(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {stage}" for stage, count in lost.items() if count) or "nothing"


def _say(text: str) -> None:
    print(f"gputail: {text}", file=sys.stderr, flush=True)


def _say_what_is_traced(tracer: Tracer) -> None:
    health = tracer.health()
    if health.libraries:
        _say(f"tracing {health.functions} functions in {health.libraries} librar{'y' if health.libraries == 1 else 'ies'}")
    else:
        _say("no process has libcuda or libnccl mapped yet; waiting for one")
    for what, reason in health.unattached.items():
        _say(f"not traced: {what}: {reason}")
