"""Speed of the analysis: wire bytes to requests, histograms, outliers and verdicts, in events a second on one core.

usage: scripts/bench decode [--json] [--rows N] [TRACE ...]

Recorded traces are repeated, shifted in time, until
there are enough rows, and handed on in drains of 50,000 rows. Without a trace, the ones in tests/data are used.
"""

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"  # before numpy: one core is what is measured

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from gputail import events, traces  # noqa: E402
from gputail.errors import GputailError  # noqa: E402
from gputail.pipeline import Pipeline  # noqa: E402

DRAIN_ROWS = 50_000
PAUSE_NS = 100_000_000  # between two repetitions


def repeated(calls: np.ndarray, rows: int) -> np.ndarray:
    """At least `rows` rows: the recording again and again, later each time."""
    span = int(events.end_ns(calls)[-1]) - int(calls["start_ns"].min()) + PAUSE_NS
    times = -(-rows // len(calls))
    out = np.tile(calls, times)
    shift = np.repeat(np.arange(times, dtype=np.uint64) * np.uint64(span), len(calls))
    out["start_ns"] += shift
    woken = (out["call"] == 200) & (out["size"] > 0)
    out["size"][woken] += shift[woken]
    return out


def measure(calls: np.ndarray) -> dict[str, float]:
    """Seconds and counts of one pass over the rows, from bytes."""
    wire = calls.tobytes()
    watermarks = events.end_ns(calls)
    pipeline = Pipeline()
    requests = outliers = 0
    begin, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(calls), DRAIN_ROWS):
        count = min(DRAIN_ROWS, len(calls) - first)
        rows = np.frombuffer(wire, events.CALL, count, first * events.CALL.itemsize)
        pipeline.feed(events.Batch(rows, watermark_ns=int(watermarks[first + count - 1])))
        for record in pipeline.take_records():
            requests += 1
            outliers += record.outlier
    pipeline.finish()
    for record in pipeline.take_records():
        requests += 1
        outliers += record.outlier
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"events": len(calls), "requests": requests, "outliers": outliers, "seconds": seconds, "cpu_seconds": cpu}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows per trace (default 2,000,000)")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="traces (.npz); default: tests/data/*.npz")
    options = parser.parse_args()
    paths = options.traces or sorted((ROOT / "tests" / "data").glob("*.npz"))
    results = {}
    try:
        for path in paths:
            results[path.stem] = measure(repeated(traces.load(path).calls, options.rows))
    except GputailError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    total = {key: sum(result[key] for result in results.values()) for key in ("events", "requests", "outliers", "seconds", "cpu_seconds")}
    if options.json:
        rate = total["events"] / total["seconds"] if total["seconds"] else None
        print(json.dumps({"benchmark": "decode", "events_per_second": rate, "total": total, "traces": results}))
        return 0
    print(f"{'trace':12} {'events':>10} {'requests':>9} {'outliers':>9} {'seconds':>8} {'events/s':>12}")
    for name, result in [*results.items(), ("all", total)]:
        print(
            f"{name:12} {result['events']:10.0f} {result['requests']:9.0f} {result['outliers']:9.0f} {result['seconds']:8.2f}"
            f" {result['events'] / result['seconds']:12,.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
