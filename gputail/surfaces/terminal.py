"""Plain text for people: tables of workloads, latency bars, outliers and their causes; under 100 columns, ASCII of our own.

In come snapshots and records, out come strings; where they are printed is left to the verbs. Names that come from other
processes are shortened and stripped of whatever could move a terminal's cursor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gputail.histogram import Histogram
from gputail.snapshot import Snapshot, WorkloadView
from gputail.surfaces import collectives
from gputail.surfaces.words import MAX_NAME, clean, duration

__all__ = ["MAX_NAME", "bars", "causes", "clean", "duration", "losses", "outliers", "quantile", "summary", "table", "workloads"]

if TYPE_CHECKING:
    from gputail.tail import RequestRecord

BAR_CHARS = 50
MAX_WORKLOADS = 20
MAX_BARS = 14


def quantile(histogram: Histogram, q: float) -> str:
    """The quantile in words; "-" where there are too few requests to speak of it."""
    return duration(histogram.quantile(q)) if histogram.count * (1 - q) >= 1 else "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Columns; those of the given numbers to the left, the others to the right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    places = ["<" if column in left else ">" for column in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:{place}{width}}" for cell, place, width in zip(line, places, widths, strict=True)).rstrip() for line in lines
    )


def bars(histogram: Histogram) -> str:
    """The distribution as bars between the smallest and the largest duration, in steps of equal ratio.

    A step with anything in it shows at least one #, so that the tail is seen.
    """
    low, high = histogram.quantile(0), histogram.quantile(1)
    if low is None or high is None:
        return "no requests"
    low = max(low, 1)
    steps = int(np.clip(np.ceil(np.log(max(high, low + 1) / low) / np.log(1.15)), 1, MAX_BARS))
    bounds = low * (max(high, low + 1) / low) ** (np.arange(steps + 1) / steps)
    counts = np.diff(histogram.cumulative(bounds[1:]), prepend=0)
    counts[-1] = histogram.count - counts[:-1].sum()  # all that is beyond the last bound by rounding
    longest = int(counts.max())
    lines = []
    for lower, upper, count in zip(bounds, bounds[1:], counts.tolist(), strict=False):
        bar = "#" * max(count * BAR_CHARS // longest, 1 if count else 0)
        lines.append(f"{duration(lower):>8} to {duration(upper):>8} |{bar:<{BAR_CHARS}} {count}")
    return "\n".join(lines)


def workloads(views: Sequence[WorkloadView]) -> str:
    """A row per workload, the busiest first."""
    ordered = sorted(views, key=lambda view: -view.requests)
    rows = [
        (
            clean(view.name),
            str(view.requests),
            quantile(view.histogram, 0.5),
            quantile(view.histogram, 0.99),
            quantile(view.histogram, 0.999),
            duration(view.baseline_ns),
            str(sum(view.outliers.values())),
        )
        for view in ordered[:MAX_WORKLOADS]
    ]
    text = table(("workload", "requests", "p50", "p99", "p99.9", "usual", "outliers"), rows)
    return text + (f"\nand {len(ordered) - MAX_WORKLOADS} more workloads" if len(ordered) > MAX_WORKLOADS else "")


def causes(views: Iterable[WorkloadView]) -> str:
    """Outliers by first cause, and the time that each cause cost."""
    outliers: Counter[str] = Counter()
    excess_ns: Counter[str] = Counter()
    for view in views:
        outliers.update(view.outliers)
        excess_ns.update(view.excess_ns)
    order = sorted(outliers | excess_ns, key=lambda cause: (-outliers[cause], -excess_ns[cause], cause))
    return table(("cause", "outliers", "excess"), [(cause, str(outliers[cause]), duration(excess_ns[cause])) for cause in order])


def outliers(records: Sequence[RequestRecord], per_cause: int = 3) -> str:
    """The outliers with the largest excess of each cause, and what most of it is made of."""
    by_cause: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: -(record.excess_ns or 0)):
        by_cause.setdefault(record.cause or "unknown", []).append(record)
    rows = [
        (str(record.pid), duration(record.duration_ns), duration(record.baseline_ns), duration(record.excess_ns), cause, *_most(record))
        for cause, found in sorted(by_cause.items(), key=lambda item: -len(item[1]))
        for record in found[:per_cause]
    ]
    return table(("pid", "duration", "usual", "excess", "cause", "of it", "culprit"), rows, left=(0, 4, 6))


def _most(record: RequestRecord) -> tuple[str, str]:
    """Time and culprit of the largest contribution."""
    if not record.contributions:
        return "-", "-"
    first = record.contributions[0]
    culprit = [f"pid {first.culprit_pid}"] if first.culprit_pid is not None else []
    if first.culprit:
        culprit.append(first.culprit)
    return duration(first.ns), clean(", ".join(culprit) or "-", 30)


def losses(lost: Mapping[str, int]) -> str:
    """What was lost, by stage; said also when it is nothing."""
    found = [f"{clean(stage)} {count}" for stage, count in sorted(lost.items()) if count]
    return "lost: " + (", ".join(found) if found else "nothing")


def summary(snapshot: Snapshot) -> str:
    """Everything of a recording or a demo that fits a page or two."""
    views = snapshot.workloads
    requests = sum(view.requests for view in views)
    incomplete = sum(view.incomplete for view in views)
    found = sum(sum(view.outliers.values()) for view in views)
    parts = [
        f"{snapshot.events} events, {requests} requests ({incomplete} incomplete) of {len(views)} workloads, {found} outliers; "
        + losses(snapshot.lost)
    ]
    if views:
        parts.append(workloads(views))
        busiest = max(views, key=lambda view: view.requests)
        parts.append(f"durations of {clean(busiest.name, 80)}\n{bars(busiest.histogram)}")
    if found:
        parts.append(causes(views))
        parts.append("largest excess of each cause\n" + outliers(snapshot.recent_outliers))
    if about_ranks := collectives.lines(snapshot):
        parts.append("\n".join(clean(line, 100) for line in about_ranks))
    return "\n\n".join(parts) + "\n"
