"""A scrape of the metrics: how long it takes, how many bytes and series it has, and by how much it delays a thread beside it.

usage: scripts/bench scrape [--json] [--workloads N] [--scrapes N]

Workloads of the tests' snapshots, each with exemplars, and 40 kinds of calls, scraped over HTTP as Prometheus does: OpenMetrics,
packed. The thread beside it wakes every 10 ms, as the drain does between two looks at the rings.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from gputail.config import Address, Settings  # noqa: E402
from gputail.surfaces.metrics import SnapshotCollector  # noqa: E402
from gputail.surfaces.metrics_access import Access  # noqa: E402
from gputail.surfaces.metrics_server import MetricsServer  # noqa: E402
from tests.unit.snapshots import outlier, snapshot, view  # noqa: E402

HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "Accept-Encoding": "gzip"}
BEAT_S = 0.01


class Beat(threading.Thread):
    """Wakes every BEAT_S and keeps by how much it woke too late (s), until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late: list[float] = []
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            due = time.perf_counter() + BEAT_S
            time.sleep(BEAT_S)
            self.late.append(time.perf_counter() - due)


def measure(workloads: int, scrapes: int) -> dict[str, float]:
    first = view(1000)
    views = [
        replace(first, name=f"python3/{pid}/HtoD..sync", tgid=pid, recent_outliers=(outlier(pid), outlier(pid, start_ns=0)))
        for pid in range(1000, 1000 + workloads)
    ]
    collector = SnapshotCollector(workloads)
    collector.publish(snapshot(*views, calls={f"cuFunctionNumber{number}": first.histogram for number in range(40)}))
    server = MetricsServer(Address("127.0.0.1", 0), collector, Access(Settings()))
    request = urllib.request.Request(f"http://{server.address}/metrics", headers=HEADERS)
    took = []
    beat = Beat()
    beat.start()
    for _ in range(scrapes):
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as answer:
            packed = answer.read()
        took.append(time.perf_counter() - begin)
    beat.is_over = True
    beat.join()
    server.close()
    text = gzip.decompress(packed)
    return {
        "workloads": workloads,
        "median_ms": 1000 * statistics.median(took),
        "worst_ms": 1000 * max(took),
        "late_p99_ms": 1000 * sorted(beat.late)[int(0.99 * len(beat.late))],
        "bytes": len(text),
        "packed_bytes": len(packed),
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench scrape", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workloads", type=int, default=200, metavar="N", help="workloads with series of their own (default 200)")
    parser.add_argument("--scrapes", type=int, default=30, metavar="N", help="how often to scrape (default 30)")
    options = parser.parse_args()
    result = measure(options.workloads, options.scrapes)
    if options.json:
        print(json.dumps({"benchmark": "scrape", **result}))
        return 0
    print(f"{result['workloads']} workloads: {result['series']} series, {result['bytes']:,} bytes, {result['packed_bytes']:,} packed")
    print(f"a scrape takes {result['median_ms']:.0f} ms in the middle, {result['worst_ms']:.0f} ms at worst")
    print(f"a thread beside it is late by {result['late_p99_ms']:.1f} ms or less in 99 of 100 times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
