"""`run` and `record`: the tracer, the analysis and the surfaces wired together, from start to SIGTERM.

The one module that knows all stages. A tick is one drain of the rings; everything else happens between two drains,
and nothing that a reader does can delay them.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from gputail.capture import CaptureWriter
from gputail.config import AUTO, OPTIONS, Settings
from gputail.effective import Effective
from gputail.errors import GputailError, UsageError
from gputail.events import Batch
from gputail.journal import ERROR, WARNING, say
from gputail.pipeline import Pipeline
from gputail.probes.launch import HeldCommand
from gputail.probes.tracer import TraceOptions, Tracer
from gputail.service import ServiceManager
from gputail.snapshot import Health, Snapshot
from gputail.surfaces import outlets
from gputail.surfaces.outlets import Outlets
from gputail.tiers import FULL, TIERS

SNAPSHOT_S = 0.5  # how often surfaces get a new view
STATUS_S = 10.0  # and the service manager


class _Stage(Protocol):
    """What is done with each batch."""

    def feed(self, batch: Batch) -> None: ...

    def finish(self) -> None: ...

    def status(self) -> str: ...

    def reload(self) -> None: ...


class _Until:
    """Why and when tracing ends: a signal, the time asked for, or the end of the command. And whether a reload is asked for."""

    def __init__(self, settings: Settings, command: HeldCommand | None, can_reload: bool) -> None:
        self._deadline = time.monotonic() + settings.duration_s if settings.duration_s else None
        self._command = command
        self.is_stopped = False
        self._is_reload_asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        if can_reload and not _has_terminal():
            signal.signal(signal.SIGHUP, self._ask_reload)

    def _ask_reload(self, number: int, frame: FrameType | None) -> None:
        self._is_reload_asked = True

    def take_reload(self) -> bool:
        asked, self._is_reload_asked = self._is_reload_asked, False
        return asked

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.is_stopped:  # asked twice: at once, whatever is lost
            os._exit(128 + number)
        self.is_stopped = True

    def reached(self) -> bool:
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return self.is_stopped or over or (self._command is not None and self._command.has_ended())


def _has_terminal() -> bool:
    """Whether there is a terminal that may hang up, which SIGHUP then stands for."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


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


def run(configuration: Effective, load: Callable[[], Effective]) -> int:
    """Trace, analyse, and serve what is found until told to end; the exit status. load: reads the configuration anew."""
    _say_configuration(configuration)
    return _trace(configuration.settings, lambda stack, tracer: _Analysis(configuration.settings, stack, tracer, load), can_reload=True)


def record(settings: Settings) -> int:
    """Write what the probes see to a file until told to end; the exit status."""
    return _trace(settings, lambda stack, tracer: _Recording(settings, stack), can_reload=False)


def _trace(settings: Settings, make_stage: Callable[[ExitStack, Tracer], _Stage], can_reload: bool) -> int:
    manager = ServiceManager(os.environ)
    manager.status("compiling and attaching probes")
    with ExitStack() as stack:
        try:
            command = HeldCommand(settings.command) if settings.command else None
            if command:
                stack.callback(command.stop)
            until = _Until(settings, command, can_reload)
            tracer = Tracer(trace_options(settings, command.pid if command else None))
            stack.callback(tracer.close)
            stage = make_stage(stack, tracer)
            _say_what_is_traced(tracer)
            if command:
                command.start()
            manager.ready(stage.status())
            _go_on(until, tracer, stage, manager)
            manager.stopping("handing on what was recorded")
            stage.feed(tracer.finish())
            stage.finish()
        except GputailError as error:
            manager.stopping(f"failed: {error.problem}")
            raise
        if command and command.status:
            say(f"{settings.command[0]} ended with status {command.status}")
    return 0


def _go_on(until: _Until, tracer: Tracer, stage: _Stage, manager: ServiceManager) -> None:
    """Drain and feed until the end. A drain that hands on nothing new, or does not come back, starves the watchdog."""
    next_status = time.monotonic() + STATUS_S
    while not until.reached():
        batch = tracer.poll()
        stage.feed(batch)
        manager.progressed(batch.watermark_ns)
        if until.take_reload():
            manager.reloading()
            stage.reload()
            manager.ready(stage.status())
        if time.monotonic() >= next_status:
            next_status = time.monotonic() + STATUS_S
            manager.status(stage.status())


def _say_configuration(configuration: Effective) -> None:
    for doubt in configuration.doubts:
        say(doubt, WARNING)
    if configuration.file:
        say(f"configuration: {configuration.file}")


class _Analysis:
    """Batches through the pipeline to the surfaces."""

    def __init__(self, settings: Settings, stack: ExitStack, tracer: Tracer, load: Callable[[], Effective]) -> None:
        self._settings = settings  # that are in force
        self._load = load
        self._refusal = ""  # what is wrong with the configuration that was to be taken in last
        self._tracer = tracer
        self._pipeline = Pipeline()
        self._next_snapshot = 0.0
        self._outlets = Outlets(settings)
        stack.callback(self._outlets.close)
        self._publish()

    def status(self) -> str:
        traced = self._tracer.health()
        status = f"tracing {traced.functions} functions in {traced.libraries} libraries, {traced.processes} processes"
        return f"{status}; configuration refused: {self._refusal}" if self._refusal else status

    def reload(self) -> None:
        """Read the configuration again and do what it says now, as far as that goes without a restart."""
        try:
            wanted = self._load()
        except UsageError as error:
            self._refusal = error.problem
            say(f"configuration not reloaded: {error.problem}" + (f"; {error.hint}" if error.hint else ""), ERROR)
            return
        self._refusal = ""
        _say_configuration(wanted)
        changed = [name for name in OPTIONS if getattr(self._settings, name) != getattr(wanted.settings, name)]
        done = [name for name in changed if OPTIONS[name].is_live and self._change(name, getattr(wanted.settings, name))]
        if "jsonl" not in changed and self._settings.jsonl:
            self._change("jsonl", self._settings.jsonl)  # opened anew: it may have been rotated
        for name in changed:
            if not OPTIONS[name].is_live:
                say(f"{name} ({wanted.origins[name]}) has changed, which takes a restart", WARNING)
        say(f"configuration reloaded; changed: {', '.join(done) or 'nothing'}")

    def _change(self, name: str, value: Any) -> bool:
        """Put a value in force; whether that could be done."""
        try:
            if name in outlets.NAMES:
                self._outlets.change(name, getattr(self._settings, name), value)
        except GputailError as error:
            say(f"{name} not changed: {error.problem}", ERROR)
            return False
        self._settings = replace(self._settings, **{name: value})
        options = trace_options(self._settings)
        self._tracer.set_pace(options.flush_s, options.budget)
        return True

    def feed(self, batch: Batch) -> None:
        self._pipeline.feed(batch)
        self._hand_on()
        if time.monotonic() >= self._next_snapshot:
            self._publish()

    def finish(self) -> None:
        self._pipeline.finish()
        self._hand_on()
        self._publish()
        snapshot: Snapshot = self._outlets.with_losses(self._pipeline.snapshot())
        requests = sum(workload.requests for workload in snapshot.workloads)
        say(f"{snapshot.events} events, {requests} requests; lost: {_lost_text(snapshot.lost)}")
        ratio = self._tracer.health().overhead_ratio
        if ratio is not None:
            say(f"tracing took about {100 * ratio:.2g}% of the CPU time of what was traced, last")

    def _hand_on(self) -> None:
        records = self._pipeline.take_records()
        for pid in {record.pid for record in records if record.outlier}:
            self._tracer.arm(pid)
        self._outlets.hand_on(records)

    def _publish(self) -> None:
        self._next_snapshot = time.monotonic() + SNAPSHOT_S
        if not self._outlets.want_snapshots:
            return
        traced = self._tracer.health()
        health = Health(
            attached_functions=traced.functions,
            attached_libraries=traced.libraries,
            unattached=traced.unattached,
            traced_processes=traced.processes,
            overhead_ratio=traced.overhead_ratio,
            budget_ratio=self._tracer.options.budget,
            processes=traced.costs,
            cpu_s=time.process_time(),
            resident_bytes=_resident_bytes(),
        )
        self._outlets.publish(self._outlets.with_losses(self._pipeline.snapshot(health)))


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

    def status(self) -> str:
        return f"recording to {self._path}"

    def reload(self) -> None:
        """There is nothing that could change."""

    def finish(self) -> None:
        self._writer.close()
        say(f"{self._calls} events recorded in {self._path}; lost: {_lost_text(self._lost)}")


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _lost_text(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {stage}" for stage, count in lost.items() if count) or "nothing"


def _say_what_is_traced(tracer: Tracer) -> None:
    health = tracer.health()
    if health.libraries:
        say(f"tracing {health.functions} functions in {health.libraries} librar{'y' if health.libraries == 1 else 'ies'}")
    else:
        say("no process has libcuda or libnccl mapped yet; waiting for one")
    for what, reason in health.unattached.items():
        say(f"not traced: {what}: {reason}", WARNING)
    for limit in health.limits:
        say(limit, WARNING)
