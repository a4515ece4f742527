"""What the control socket says: snapshots, one workload in detail, and verdicts, as plain dictionaries.

In come the snapshot and the records of the analysis, out come messages as docs/control-protocol.md describes them. Quantiles and
bars are worked out here, so that what shows them needs neither numpy nor the analysis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gputail.histogram import Histogram
from gputail.snapshot import Snapshot, WorkloadView
from gputail.surfaces import collectives
from gputail.surfaces.report.stories import story
from gputail.tail import RequestRecord
from gputail.timeline import Timeline
from gputail.trend import WINDOW_NS, recent

VERSION = 1
TREND = 24  # windows in a snapshot's sparkline
MAX_BARS = 24
MAX_TEXT = 256
MAX_UNATTACHED = 32
MAX_PROCESSES = 32


def snapshot(snap: Snapshot, daemon: Mapping[str, Any]) -> dict[str, Any]:
    """Everything at a glance. daemon: what it says of itself (pid, version, ...)."""
    health = snap.health
    return {
        "v": VERSION,
        "type": "snapshot",
        "daemon": dict(daemon),
        "time_ns": snap.time_ns,
        "events": snap.events,
        "lost": {stage: count for stage, count in snap.lost.items() if count},
        "health": {
            "processes": [
                {
                    "pid": one.tgid,
                    "comm": one.comm,
                    "tier": one.tier,
                    "hits_per_s": one.hits_per_s,
                    "share": one.share,
                    "shed_s": one.shed_s,
                }
                for one in health.processes[:MAX_PROCESSES]
            ],
            "overhead_ratio": health.overhead_ratio,
            "attached_functions": health.attached_functions,
            "attached_libraries": health.attached_libraries,
            "traced_processes": health.traced_processes,
            "unattached": {what[:MAX_TEXT]: why[:MAX_TEXT] for what, why in list(health.unattached.items())[:MAX_UNATTACHED]},
            "unattached_count": len(health.unattached),
            "cpu_s": health.cpu_s,
            "resident_bytes": health.resident_bytes,
        },
        "workloads": [_workload(view, snap.time_ns) for view in snap.workloads],
        **collectives.as_dicts(snap),
    }


def workload(snap: Snapshot, name: str) -> dict[str, Any] | None:
    """One workload in detail; None where there is none of that name."""
    view = next((view for view in snap.workloads if view.name == name), None)
    if view is None:
        return None
    latest, _, _ = recent(view.windows, snap.time_ns)
    return {
        "v": VERSION,
        "type": "workload",
        "time_ns": snap.time_ns,
        "workload": _workload(view, snap.time_ns),
        "bars": bars(view.histogram, latest),
        "causes": _causes(view),
        "outliers": [verdict(record) for record in reversed(view.recent_outliers)],
    }


def verdict(record: RequestRecord) -> dict[str, Any]:
    """An outlier: its record, in words its story, and its timeline where it has one."""
    return {"v": VERSION, "type": "verdict", "story": story(record), "record": record.as_dict(), "timeline": _timeline(record.timeline)}


def _timeline(timeline: Timeline | None) -> list[dict[str, Any]] | None:
    if timeline is None:
        return None
    lanes = timeline.lanes
    return [{"name": lane.name, "pid": lane.pid, "cells": "".join(CELL_LETTERS[kind] for kind in lane.kinds)} for lane in lanes]


# A letter for each kind of cell: the parts of the budget in their order, then what others did.
CELL_LETTERS = "hrzlcamwno" + " gpx"


def _workload(view: WorkloadView, time_ns: int) -> dict[str, Any]:
    latest, outliers, since_ns = recent(view.windows, time_ns)
    span_s = max(time_ns - max(since_ns, view.first_start_ns), 0) / 1e9
    return {
        "name": view.name,
        "pid": view.tgid,
        "comm": view.comm,
        "command": view.command,
        "container": view.container,
        "gpu": view.gpu,
        "shape": view.shape,
        "baseline_ns": view.baseline_ns,
        "requests": view.requests,
        "incomplete": view.incomplete,
        "outliers": sum(view.outliers.values()),
        "excess_ns": sum(view.excess_ns.values()),
        "last_end_ns": view.last_end_ns,
        "recent": _figures(latest, outliers, span_s),
        "total": _figures(view.histogram, sum(view.outliers.values()), max(time_ns - view.first_start_ns, 0) / 1e9),
        "trend": _trend(view, time_ns),
        "top": _top(view.recent_outliers, since_ns),
    }


def _figures(histogram: Histogram, outliers: int, span_s: float) -> dict[str, Any]:
    """Null where there are too few requests, or too short a time, to speak of it."""
    requests = histogram.count
    spoken = span_s >= 1
    return {
        "span_s": round(span_s, 3),
        "requests": requests,
        "rate": round(requests / span_s, 3) if spoken else None,
        "outliers_per_min": round(outliers * 60 / span_s, 2) if spoken else None,
        **{name: histogram.quantile(q) if requests * (1 - q) >= 1 else None for name, q in _QUANTILES},
    }


_QUANTILES = (("p50_ns", 0.5), ("p99_ns", 0.99), ("p999_ns", 0.999))


def _trend(view: WorkloadView, time_ns: int) -> list[int | None]:
    """The tail (ns) of the last TREND windows, oldest first; None where nothing ended."""
    last = time_ns // WINDOW_NS
    tails: list[int | None] = [None] * TREND
    for window in view.windows:
        place = TREND - 1 - (last - window.start_ns // WINDOW_NS)
        if 0 <= place < TREND:
            tails[place] = window.tail_ns
    return tails


def _top(records: Iterable[RequestRecord], since_ns: int) -> dict[str, Any] | None:
    """What most of the excess of the latest outliers went to, and who is to blame for most of that."""
    by_cause: defaultdict[str, int] = defaultdict(int)
    by_culprit: defaultdict[tuple[str, int | None], int] = defaultdict(int)
    text: dict[tuple[str, int | None], str | None] = {}
    for record in records:
        if record.end_ns < since_ns:
            continue
        for part in record.contributions:
            by_cause[part.cause] += part.ns
            by_culprit[part.cause, part.culprit_pid] += part.ns
            text[part.cause, part.culprit_pid] = part.culprit
    if not by_cause:
        return None
    cause = max(by_cause, key=lambda cause: by_cause[cause])
    key = max((key for key in by_culprit if key[0] == cause), key=lambda key: by_culprit[key])
    total = sum(by_cause.values())
    culprit = text[key]
    return {
        "cause": cause,
        "share": round(by_cause[cause] / total, 3) if total else None,
        "culprit_pid": key[1],
        "culprit": culprit and culprit[:MAX_TEXT],
    }


def _causes(view: WorkloadView) -> list[dict[str, Any]]:
    """Causes by their share of the excess, the largest first."""
    total = sum(view.excess_ns.values())
    return [
        {
            "cause": cause,
            "outliers": view.outliers.get(cause, 0),
            "excess_ns": view.excess_ns.get(cause, 0),
            "share": round(view.excess_ns.get(cause, 0) / total, 4) if total else None,
        }
        for cause in sorted(view.outliers.keys() | view.excess_ns.keys(), key=lambda cause: (-view.excess_ns.get(cause, 0), cause))
    ]


def bars(whole: Histogram, latest: Histogram) -> list[dict[str, int]]:
    """The distribution lately and before, in up to MAX_BARS steps of equal ratio: from_ns, to_ns, recent, before."""
    low, high = whole.quantile(0), whole.quantile(1)
    if low is None or high is None:
        return []
    low = max(low, 1)
    high = max(high, low + 1)
    steps = int(np.clip(np.ceil(np.log(high / low) / np.log(1.1)), 1, MAX_BARS))
    bounds = low * (high / low) ** (np.arange(steps + 1) / steps)

    def counts(histogram: Histogram) -> list[int]:
        found = np.diff(histogram.cumulative(bounds[1:]), prepend=0)
        found[-1] = histogram.count - found[:-1].sum()  # all that is beyond the last bound by rounding
        return found.tolist()

    return [
        {"from_ns": int(start), "to_ns": int(end), "recent": now, "before": max(ever - now, 0)}
        for start, end, now, ever in zip(bounds, bounds[1:], counts(latest), counts(whole))
    ]
