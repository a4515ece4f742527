"""The tracer: finds libraries, keeps probes on them, and turns what the rings hold into batches.

In: what to trace. Out: one `Batch` a flush interval, and what could not be attached and why. What the events mean is
left to the analysis.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gputail.discovery import libraries
from gputail.discovery.elf import ElfRefused, read_symbols
from gputail.discovery.libraries import Identity, Library
from gputail.discovery.processes import Scanner
from gputail.errors import GputailError
from gputail.events import CALL, NAME, Batch, Process
from gputail.probes import syscalls
from gputail.probes.calibration import probe_costs
from gputail.probes.cpu_time import cpu_time_ns
from gputail.probes.governor import TICK_S, Costs, Governor
from gputail.probes.handles import HandleNames
from gputail.probes.host import HostProbes
from gputail.probes.links import MultiAttacher, Site, make_attacher, probe_offset
from gputail.probes.rings import Merger, PerfRings, concatenated_names, summed
from gputail.probes.table import BY_SYMBOL, CUDA, EXIT_CALL, NCCL, TIER_CALL
from gputail.probes.tiering import LibraryProbes, Tiering
from gputail.snapshot import ProcessCost
from gputail.tiers import FULL, TIERS, tier_of

RINGS_TOTAL_BYTES = 64 << 20
RING_MAX_BYTES = 4 << 20
NAME_RING_BYTES = 128 << 10
# Probes stay this long on a library that no process has mapped any more.
LINGER_S = 10.0
# A record is in its ring at most this long after the end it states, unless its thread was kept off the CPU in between.
HOLD_NS = 10_000_000
MAX_REFUSED = 4096
MAX_COSTS = 100
_WANTED = {kind: frozenset(symbol for symbol, function in BY_SYMBOL.items() if function.library == kind) for kind in (CUDA, NCCL)}


@dataclass(frozen=True)
class TraceOptions:
    """What to trace and how. pids: only these processes and their children; none means every process."""

    pids: frozenset[int] = frozenset()
    libraries: tuple[str, ...] = ()  # attached at start, whether or not a process has them mapped
    flush_s: float = 0.05
    scan_s: float = 1.0
    off_cpu: bool = True
    max_threads: int = 16384
    use_multi: bool | None = None  # None: as the kernel allows
    ring_bytes: int | None = None  # per CPU; None: by the number of CPUs
    tier: int = FULL  # of probes, that every process gets to begin with
    budget: float | None = None  # share of its CPU time that tracing may cost a process; None: its tier stays


@dataclass
class _Attached:
    library: Library
    probes: LibraryProbes
    functions: int
    last_used: float  # time.monotonic()


@dataclass(frozen=True)
class TracerHealth:
    """What is attached; `unattached` says of each library or function that is not, why."""

    functions: int
    libraries: int
    processes: int
    unattached: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()  # sentences on what is worse than it could be, and why
    call_cost_ns: float | None = None  # as measured at start; None: not known
    overhead_ratio: float | None = None  # of the CPU time of what is traced; None: not known (yet)
    costs: tuple[ProcessCost, ...] = ()  # of MAX_COSTS processes, the dearest first


class Tracer:
    """Traces until closed. `poll` must be called at least as often as the rings fill."""

    def __init__(self, options: TraceOptions) -> None:
        """Load, attach to every library in use, start recording. GputailError where this machine cannot be traced."""
        self.options = options
        attacher = make_attacher(
            off_cpu=options.off_cpu, only_targets=bool(options.pids), max_threads=options.max_threads, use_multi=options.use_multi
        )
        self._attacher = attacher
        self._kernel = attacher.kernel
        cpus = os.cpu_count() or 1
        ring_bytes = options.ring_bytes or min(RING_MAX_BYTES, max(256 << 10, RINGS_TOTAL_BYTES // cpus))
        # Names first: they are few, and must not go without where there is little memory that may be locked.
        self._names = PerfRings(self._kernel.map_fd("names_ring"), NAME, NAME_RING_BYTES)
        self._calls = PerfRings(self._kernel.map_fd("calls_ring"), CALL, ring_bytes)
        self._wanted_ring_bytes = ring_bytes
        if options.pids:
            self._kernel.add_targets(options.pids)
        self._host = HostProbes(self._kernel, off_cpu=options.off_cpu)
        self._tiering = Tiering(self._kernel, options.tier)
        costs = self._calibrated()
        self._governor = Governor(costs, options.budget if options.budget is not None else math.inf) if costs else None
        self._next_tick = time.monotonic() + TICK_S
        self._ticked_at = time.monotonic()
        self._merger = Merger(HOLD_NS)
        self._handles = HandleNames()
        self._scanner = Scanner()
        self._attached: dict[Identity, _Attached] = {}
        self._pinned: set[Identity] = set()  # attached by name: kept whether or not anyone uses them
        self._hopeless: OrderedDict[Identity, None] = OrderedDict()  # looked at and found unfit: not looked at again
        self._unattached: OrderedDict[str, str] = OrderedDict()
        self._refused: dict[str, str] = {}
        self._described: dict[int, Process] = {}
        self._look_again: dict[int, tuple[float, float]] = {}  # tgid: when, and how long after that
        self._changed: list[Process] = []
        self._exits: list[tuple[int, int]] = []  # of traced processes, not yet handed on: when noticed (ns), tgid
        self._counts = self._kernel.counts()  # of what calibration lost, if anything, there is nothing to tell
        self._next_scan = 0.0
        for path in options.libraries:
            self._attach_path(path)
        for path in installed_libraries():
            with suppress(GputailError):  # nobody has asked for it
                self._attach_path(path)
        self._follow_libraries()

    def _calibrated(self) -> Costs | None:
        """What a traced call costs here; None where that cannot be measured: with single probes, which take long to detach."""
        if not isinstance(self._attacher, MultiAttacher):
            return None
        is_stranger = self._kernel.only_targets and os.getpid() not in self.options.pids
        if is_stranger:
            self._kernel.add_targets([os.getpid()])
        try:
            return probe_costs(self._attacher)
        except (OSError, GputailError):
            return None
        finally:
            if is_stranger:
                self._kernel.remove_target(os.getpid())
            self._calls.drain()
            self._names.drain()

    def poll(self) -> Batch:
        """Wait for the flush interval (or half a ring), then hand on what has been recorded."""
        self._calls.wait(self.options.flush_s)
        if time.monotonic() >= self._next_scan:
            self._follow_libraries()
        return self._batch(last=False)

    def finish(self) -> Batch:
        """Take the probes off and hand on all that was recorded until then."""
        self._detach()
        return self._batch(last=True)

    def suspend(self) -> None:
        """Take every probe off for a while; the time until `resume` is nobody's. For measuring what tracing costs."""
        self._tiering.suspend()

    def resume(self, tier: int | None = None) -> None:
        """Put them on again: as they were, or at a tier for every process, from then on."""
        self._tiering.resume(tier)
        if self._governor:
            self._governor.begin_anew(self._cpu_times())
            self._ticked_at = time.monotonic()
            self._next_tick = self._ticked_at + TICK_S

    def _cpu_times(self) -> dict[int, int]:
        governed = self._governor.processes if self._governor else ()
        return {tgid: used for tgid in governed if (used := cpu_time_ns(tgid)) is not None}

    def set_pace(self, flush_s: float, budget: float | None) -> None:
        """How often to drain, and what tracing may cost a process, from now on. None, or having begun with none: its tier stays."""
        self.options = replace(self.options, flush_s=flush_s, budget=budget if self.options.budget is not None else None)
        if self._governor and self.options.budget is not None:
            self._governor.set_budget(self.options.budget)

    def arm(self, tgid: int) -> None:
        """A process has an outlier: look closer at it while its budget pays for that."""
        if self._governor:
            self._governor.arm(tgid)

    def close(self) -> None:
        self._detach()
        self._calls.close()
        self._names.close()
        self._scanner.close()
        self._kernel.close()

    def _detach(self) -> None:
        with self._orphans_are_no_loss():
            syscalls.all_at_once([self._tiering.close, self._host.close])
        self._attached.clear()

    @contextmanager
    def _orphans_are_no_loss(self) -> Iterator[None]:
        """While probes go on or come off. Return probes are there longer than entry probes, so calls that run meanwhile
        return without an entry: they began before tracing did, or after it had ended, and nothing of what was to be
        traced is lost with them. (A call that is open right as probes go on will be counted, though.)
        """
        before = self._kernel.counts()["return_orphaned"]
        yield
        meanwhile = self._kernel.counts()["return_orphaned"] - before
        self._counts["return_orphaned"] = self._counts.get("return_orphaned", 0) + meanwhile

    def health(self) -> TracerHealth:
        governor = self._governor
        return TracerHealth(
            functions=sum(attached.functions for attached in self._attached.values()),
            libraries=len(self._attached),
            processes=len(self._described),
            unattached={**self._unattached, **self._refused, **{f"pid {tgid}": why for tgid, why in list(self._tiering.failed.items())}},
            limits=tuple(self._limits()),
            call_cost_ns=governor.costs.pair_ns if governor else None,
            overhead_ratio=governor.ratio if governor else None,
            costs=tuple(self._costs(governor)) if governor else (),
        )

    def _limits(self) -> Iterator[str]:
        if self._calls.bytes_per_cpu < self._wanted_ring_bytes:
            sizes = f"{self._calls.bytes_per_cpu >> 10} instead of {self._wanted_ring_bytes >> 10} KiB a CPU"
            yield f"rings are small ({sizes}), since little memory may be locked: raise RLIMIT_MEMLOCK (LimitMEMLOCK= of the service)"
        for cpu, why in sorted(self._calls.uncovered.items()):
            yield f"CPU {cpu} has no ring: {why}"

    def _costs(self, governor: Governor) -> Iterator[ProcessCost]:
        known = [(tgid, one) for tgid, one in governor.processes.items() if tgid in self._described]
        for tgid, one in sorted(known, key=lambda entry: (-(entry[1].share or 0), entry[0]))[:MAX_COSTS]:
            yield ProcessCost(tgid, self._described[tgid].comm, TIERS[tier_of(one.state)], one.hits_per_s, one.share, one.shed_s)

    def _batch(self, last: bool) -> Batch:
        began_ns = time.monotonic_ns()
        arrays, _, malformed = self._calls.drain()
        name_arrays, _, malformed_names = self._names.drain()
        rows, late = self._merger.merge([*arrays, self._tiering.take_rows(), self._take_exits()], began_ns)
        if last:
            rows = np.concatenate((rows, self._merger.flush()))
        calls = rows[(rows["call"] != TIER_CALL) & (rows["call"] != EXIT_CALL)]
        self._govern(calls)
        has_touched = self._tiering.take_touched()
        counts = self._kernel.counts()
        lost = summed(counts, self._counts)
        if has_touched:  # what was entered under two links, or before one of them was there
            lost = {stage: number for stage, number in lost.items() if not stage.endswith("_orphaned")}
        self._counts = counts
        for stage, number in (("late", late), ("malformed", malformed + malformed_names)):
            if number:
                lost[stage] = number
        names = concatenated_names(name_arrays)
        names = np.concatenate((names, self._handles.learn(calls, names)))
        return Batch(rows, names, self._news_of(calls), lost, self._merger.watermark_ns)

    def _take_exits(self) -> np.ndarray:
        """The traced processes that have ended since it was last asked, as CALL rows."""
        exits, self._exits = self._exits, []
        rows = np.zeros(len(exits), CALL)
        if exits:
            rows["start_ns"], rows["tgid"] = np.array(exits, np.int64).T
            rows["call"] = EXIT_CALL
        return rows

    def _govern(self, calls: np.ndarray) -> None:
        """Count what the calls cost, and change tiers when that is due."""
        if not self._governor:
            return
        self._governor.count(calls)
        now = time.monotonic()
        if now < self._next_tick:
            return
        seconds, self._ticked_at, self._next_tick = now - self._ticked_at, now, now + TICK_S
        times = self._cpu_times()
        wanted = self._governor.tick(seconds, times)
        for tgid in [tgid for tgid in self._governor.processes if tgid not in times]:
            self._governor.forget(tgid)
        if self.options.budget is None:
            return
        if wanted:
            self._tiering.change(wanted, self._described)
        self._tiering.consider_uniting()

    def _news_of(self, calls: np.ndarray) -> tuple[Process, ...]:
        """Processes that are in these calls and were not described before. Those that have ended stay what the kernel says."""
        news, self._changed = self._changed, []
        for tgid in np.unique(calls["tgid"]).tolist():
            if tgid not in self._described:
                self._described[tgid] = process = self._scanner.describe(tgid) or Process(tgid)
                self._look_again[tgid] = time.monotonic() + self.options.scan_s, self.options.scan_s
                news.append(process)
        self._tiering.adopt(process.tgid for process in news)
        return tuple(news)

    def _describe_again(self) -> None:
        """Processes open GPUs, and get a name, while they start: look at each again after a scan, then after twice as long."""
        now = time.monotonic()
        for tgid, (due, wait_s) in list(self._look_again.items()):
            if now < due:
                continue
            self._look_again[tgid] = now + 2 * wait_s, 2 * wait_s
            process = self._scanner.describe(tgid)
            if process is None:
                continue
            process = replace(process, start_ns=self._described[tgid].start_ns or process.start_ns)  # two clocks told it, a little apart
            if process != self._described[tgid]:
                self._described[tgid] = process
                self._changed.append(process)

    def _follow_libraries(self) -> None:
        """Attach to libraries that have appeared, and let go of those that no process has any more."""
        self._next_scan = time.monotonic() + self.options.scan_s
        self._calls.cover_new_cpus()
        self._names.cover_new_cpus()
        scan = self._scanner.scan()
        for tgid in scan.ended:
            self._look_again.pop(tgid, None)
            if self._described.pop(tgid, None):
                self._exits.append((time.monotonic_ns(), tgid))
        self._describe_again()
        self._tiering.forget(scan.ended)
        self._refused = {f"{refused.path} of pid {refused.pid}": refused.reason for refused in scan.refused}
        self._refused |= {f"pid {pid}": "its memory map is too long to read whole" for pid in scan.capped}
        in_use = {library.identity: library for library in scan.libraries}
        self._let_go(in_use)
        for library in in_use.values():
            self._attach(library)

    def _let_go(self, in_use: Mapping[Identity, Library]) -> None:
        """Take probes off libraries that nobody has had mapped for a while, so that the next short job's first calls are seen.

        Off one that was rewritten in place at once: its successor is the same inode, and both probed would count twice.
        """
        now = time.monotonic()
        places = {(library.device, library.inode) for identity, library in in_use.items() if identity not in self._attached}
        for identity, attached in list(self._attached.items()):
            if identity in in_use or identity in self._pinned:
                attached.last_used = now
            library = attached.library
            if (library.device, library.inode) in places or now - attached.last_used > LINGER_S:
                with self._orphans_are_no_loss():
                    self._tiering.detach(self._attached.pop(identity).probes)

    def _attach(self, library: Library) -> None:
        if library.identity in self._attached or library.identity in self._hopeless:
            return
        try:
            fd = library.open()
        except FileNotFoundError:  # whoever had it mapped has ended meanwhile
            return
        except OSError as error:
            _put(self._unattached, library.path, f"cannot be opened: {error.strerror or error}")
            return
        try:
            self._attach_file(library, fd)
        finally:
            os.close(fd)

    def _attach_path(self, path: str) -> None:
        try:
            library, fd = libraries.at(path)
        except OSError as error:
            raise GputailError(f"cannot open the library {path}: {error.strerror or error}") from error
        try:
            self._attach_file(library, fd)
        finally:
            os.close(fd)
        if library.identity not in self._attached:
            raise GputailError(f"cannot trace the library {path}: {self._unattached[library.path]}")
        self._pinned.add(library.identity)

    def _attach_file(self, library: Library, fd: int) -> None:
        """Attach by the open file: whatever lies at its path by now, this is what is mapped."""
        if library.identity in self._attached or library.identity in self._hopeless:
            return
        try:
            found = read_symbols(fd, _WANTED[library.kind])
        except ElfRefused as error:
            _put(self._hopeless, library.identity, None)
            _put(self._unattached, library.path, str(error))
            return
        sites = [Site(probe_offset(offset, site.code), BY_SYMBOL[site.symbols[0]], site.symbols[0]) for offset, site in found.sites.items()]
        if not sites:
            _put(self._hopeless, library.identity, None)
            _put(self._unattached, library.path, "none of the functions to be traced is in it")
            return
        for symbol, reason in found.unusable.items():
            _put(self._unattached, f"{symbol} in {library.path}", reason)
        with self._orphans_are_no_loss():
            probes = self._tiering.attach(self._attacher, library.kind, fd, sites)
        self._attached[library.identity] = _Attached(library, probes, len(sites), time.monotonic())


def _put(store: OrderedDict[Any, Any], key: object, value: object) -> None:
    """Keep that, and no more than MAX_REFUSED such: whoever maps one unfit file can map any number."""
    store[key] = value
    store.move_to_end(key)
    if len(store) > MAX_REFUSED:
        store.popitem(last=False)


def installed_libraries() -> tuple[str, ...]:
    """Where the loader would find the driver and NCCL: attached before anyone uses them, so that no first call is missed."""
    try:
        listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    machine = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(os.uname().machine, "")
    found = []
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith(("libcuda.so.1 ", "libnccl.so.2 ")) and machine in name and os.path.exists(path):
            found.append(path)
    return tuple(dict.fromkeys(map(os.path.realpath, found)))
