"""One immutable view of everything the analysis knows at a tick; the only thing that surfaces are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputail.baseline import RegimeChange
    from gputail.blame import CulpritView
    from gputail.drift import Drift
    from gputail.histogram import Histogram
    from gputail.members import CommunicatorView
    from gputail.tail import RequestRecord
    from gputail.trend import Window


@dataclass(frozen=True)
class WorkloadView:
    """A process and a request shape: what one latency histogram is kept for. Unknown is None."""

    name: str  # unique in the snapshot, stable over the life of the workload; the record's `workload`
    tgid: int
    comm: str | None
    command: str | None
    container: str | None
    shape: str  # what a request of it looks like, e.g. "HtoD..sync"
    histogram: Histogram  # request durations, every request counted (incomplete ones too)
    requests: int
    incomplete: int
    outliers: Mapping[str, int]  # by cause
    excess_ns: Mapping[str, int]  # by cause
    baseline_ns: int | None  # None until it has been learned
    last_end_ns: int
    first_start_ns: int = 0
    windows: tuple[Window, ...] = ()  # of the last minutes, oldest first
    recent_outliers: tuple[RequestRecord, ...] = ()  # newest last, bounded
    gpu: str | None = None
    tier: str = "full"  # of the probes at its last request


@dataclass(frozen=True)
class ProcessCost:
    """What the probes see of a process, and what they take of its CPU time (share; None: not known)."""

    tgid: int
    comm: str | None
    tier: str
    hits_per_s: float
    share: float | None
    shed_s: float  # how long it has had less than the full tier


@dataclass(frozen=True)
class Health:
    """What gputail itself does, costs and misses; filled in by the daemon, empty in a replay."""

    attached_functions: int = 0
    attached_libraries: int = 0
    unattached: Mapping[str, str] = field(default_factory=dict)  # function or library -> reason
    overhead_ratio: float | None = None  # None: not measured
    processes: tuple[ProcessCost, ...] = ()  # the dearest first, bounded
    traced_processes: int = 0
    cpu_s: float | None = None  # CPU time that gputail itself has used
    resident_bytes: int | None = None
    budget_ratio: float | None = None  # what tracing may cost each process, of its CPU time; None: nothing bounds it


@dataclass(frozen=True)
class Snapshot:
    time_ns: int  # CLOCK_MONOTONIC watermark: what happened before it is in
    workloads: tuple[WorkloadView, ...] = ()
    calls: Mapping[str, Histogram] = field(default_factory=dict)  # call durations by function label
    events: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)  # totals by stage
    recent_outliers: tuple[RequestRecord, ...] = ()  # newest last, bounded
    regime_changes: tuple[RegimeChange, ...] = ()  # newest last, bounded
    culprits: tuple[CulpritView, ...] = ()  # bounded, the one blamed last at the end
    communicators: tuple[CommunicatorView, ...] = ()  # of NCCL, those used latest last
    drifts: tuple[Drift, ...] = ()  # lasting shifts of one rank's lateness; newest last, bounded
    health: Health = Health()
