"""Snapshots of made-up workloads, for the tests of what shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gputail.budget import HOST, LAUNCH, PARTS, SYNC
from gputail.histogram import Histogram
from gputail.snapshot import Health, ProcessCost, Snapshot, WorkloadView
from gputail.tail import Contribution, RequestRecord
from gputail.timeline import CELLS, KERNELS, NOTHING, Lane, Timeline
from gputail.trend import WINDOW_NS, Window

MS, S = 1_000_000, 1_000_000_000
NOW_NS = 1000 * S


_CALLS = bytes(kind for kind in (HOST, LAUNCH, SYNC) for _ in range(CELLS // 3))
_OTHERS = bytes(kind for kind in (NOTHING, KERNELS) for _ in range(CELLS // 2))
_TIMELINE = Timeline(0, 12_500_000, (Lane("calls", None, _CALLS), Lane("pid 556", 556, _OTHERS)))


def outlier(pid: int = 1000, end_ns: int = NOW_NS - S, cause: str = "foreign_kernel", **changes: Any) -> RequestRecord:
    """A request of 12.5 ms where 5.2 are usual."""
    parts = {"host": 400_000, "launch": 1 * MS, "copy": 1_100_000, "sync": 10 * MS}
    excess = 7_300_000
    record = RequestRecord(
        pid, pid, "python3", f"python3/{pid}/HtoD..sync", end_ns - 12_500_000, end_ns, "sync", 154, 139, False, True,
        tuple(parts.get(part, 0) for part in PARTS), 5_200_000, excess, cause, 0.97,
        (Contribution(cause, 7_100_000, 556, "sm90_xmma_gemm_f16"), Contribution("unknown", 200_000)), timeline=_TIMELINE,
    )  # fmt: skip
    return replace(record, **changes)


def histogram(durations_ns: Any) -> Histogram:
    made = Histogram()
    made.add(np.asarray(durations_ns, np.int64))
    return made


def window(age: int, durations_ns: Any, outliers: int = 0, now_ns: int = NOW_NS) -> Window:
    """The window so many before that of `now_ns`."""
    counted = histogram(durations_ns)
    buckets = np.flatnonzero(counted.counts)
    tail_ns = counted.quantile(0.99)
    assert tail_ns is not None
    return Window((now_ns // WINDOW_NS - age) * WINDOW_NS, len(durations_ns), outliers, tail_ns, buckets, counted.counts[buckets])


def view(pid: int = 1000, outliers: int = 2, now_ns: int = NOW_NS, seed: int = 0, **changes: Any) -> WorkloadView:
    """A workload that has made 20 requests a second for the last two minutes, of about 5.2 ms, a few of 12.5 ms."""
    random = np.random.default_rng(pid + seed)
    windows = []
    whole = Histogram()
    for age in range(23, -1, -1):
        durations = (5.2 * MS * random.lognormal(0, 0.03, 100)).astype(np.int64)
        durations[: min(outliers, 100)] = 12_500_000
        windows.append(window(age, durations, outliers, now_ns))
        whole.add(durations)
    records = tuple(outlier(pid, now_ns - number * S) for number in range(min(outliers, 32), 0, -1))
    fields: dict[str, Any] = dict(
        name=f"python3/{pid}/HtoD..sync", tgid=pid, comm="python3", command=f"/usr/bin/python3 -u /srv/model{pid}/serve.py --port 80",
        container="3f2a91bc77de", shape="HtoD..sync", histogram=whole, requests=whole.count, incomplete=3,
        outliers={"foreign_kernel": 24 * outliers} if outliers else {},
        excess_ns={"foreign_kernel": 170 * MS * outliers, "unknown": 5 * MS * outliers} if outliers else {},
        baseline_ns=5_200_000, last_end_ns=now_ns, first_start_ns=now_ns - 120 * S, windows=tuple(windows), recent_outliers=records,
    )  # fmt: skip
    return WorkloadView(**fields | changes)


def snapshot(*views: WorkloadView, now_ns: int = NOW_NS, **changes: Any) -> Snapshot:
    costs = (ProcessCost(1000, "python3", "light", 31_000.0, 0.0093, 42.0), ProcessCost(1001, "python3", "full", 900.0, 0.0007, 0.0))
    health = Health(96, 1, {"/opt/libnccl.so.2": "no symbols"}, None, costs, len(views), 12.5, 84 << 20)
    fields: dict[str, Any] = dict(time_ns=now_ns, workloads=views, events=123_456, lost={"ring_full": 0}, health=health)
    return Snapshot(**fields | changes)
