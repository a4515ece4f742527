"""Two simpler ways of naming a cause, to be scored beside gputail's in the same run.

They are reconstructions from published descriptions of how other tools decide, given the same rows that gputail had, and
given for nothing which requests were slow. In: CALL rows and a truth. Out: for each slow request a cause, or "".
"""

from __future__ import annotations

import numpy as np

from gputail.budget import C_ALLOC, C_COPY, C_FREE, C_GRAPH, C_HTOD, C_LAUNCH, C_MODULE, C_OFF_CPU, CLASS_OF_CALL
from gputail.events import end_ns
from gputail.probes.table import FUNCTIONS
from gputail.sim.scenario import Truth

BIN_NS = 10_000_000
LAGS = range(6)  # bins
WINDOW_BINS = 1000  # 10 s
SWITCHES, TIMES = 5, 3.0
_DEVICE_WIDE = [function.number for function in FUNCTIONS if function.waits_for == "device"]


def strongest_correlation(calls: np.ndarray, truth: Truth, slow: np.ndarray) -> list[str]:
    """Signals in bins of 10 ms; the cause is that whose signal correlates most with the latency, at the best lag.

    slow: numbers of the requests to name. The correlation is taken over the 10 s around each.
    """
    start = int(min(calls["start_ns"].min(), truth.requests[:, 0].min()))
    bins = int((int(end_ns(calls).max()) - start) // BIN_NS) + 1
    took = (truth.requests[:, 1] - truth.requests[:, 0]).astype(float)
    ended = ((truth.requests[:, 1] - start) // BIN_NS).astype(int).clip(0, bins - 1)
    count = np.bincount(ended, minlength=bins)
    latency = np.bincount(ended, took, bins) / np.maximum(count, 1)
    latency[count == 0] = np.median(took)
    signals = _signals(calls, truth, start, bins)
    causes = []
    for number in slow:
        low = max(0, ended[number] - WINDOW_BINS // 2)
        window = slice(low, low + WINDOW_BINS)
        scores = {cause: max(_correlation(latency[window], signal[window], lag) for lag in LAGS) for cause, signal in signals.items()}
        best = max(scores, key=lambda cause: scores[cause])
        causes.append(best if scores[best] > 0 else "")
    return causes


def _signals(calls: np.ndarray, truth: Truth, start: int, bins: int) -> dict[str, np.ndarray]:
    """What went on in each bin, by the cause that it would be a sign of."""
    at = ((calls["start_ns"].astype(np.int64) - start) // BIN_NS).clip(0, bins - 1)
    kind = CLASS_OF_CALL[calls["call"]]
    mine, own_process = calls["tid"] == truth.victim, calls["tgid"] == truth.victim
    launches, copies = (kind == C_LAUNCH) | (kind == C_GRAPH), (kind >= C_HTOD) & (kind <= C_COPY)
    off, runnable = kind == C_OFF_CPU, (calls["handle"] == 0) | (calls["handle"] == 256)
    duration, size = calls["duration_ns"].astype(float), calls["size"].astype(float)

    def total(rows: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(at[rows], None if weight is None else weight[rows], bins).astype(float)

    return {
        "foreign_kernel": total(~own_process & launches),
        "foreign_copy": total(~own_process & copies, size),
        "sibling_kernel": total(own_process & ~mine & launches),
        "blocking_sync": total(mine & np.isin(calls["call"], _DEVICE_WIDE), duration),
        "memory_alloc": total(mine & ((kind == C_ALLOC) | (kind == C_FREE)), duration),
        "module_load": total(mine & (kind == C_MODULE), duration),
        "memcpy": total(mine & copies, size),
        "more_work": total(mine & launches),
        "launch_backpressure": total(mine & launches, duration),
        "cpu_preempted": total(mine & off & runnable, duration),
        "host_blocked": total(mine & off & ~runnable, duration),
        "host_compute": -total(mine, duration),  # nothing else to see of it than less time in calls
    }


def _correlation(latency: np.ndarray, signal: np.ndarray, lag: int) -> float:
    """Pearson's, of the latency with the signal of `lag` bins before; 0 where either does not vary."""
    if lag:
        latency, signal = latency[lag:], signal[:-lag]
    deviation = latency.std() * signal.std()
    return float(((latency - latency.mean()) * (signal - signal.mean())).mean() / deviation) if deviation else 0.0


def contention_rule(calls: np.ndarray, truth: Truth, slow: np.ndarray) -> list[str]:
    """CPU contention where p99 is over three times p50 and the thread was switched out five times or more, in 10 s windows."""
    took = truth.requests[:, 1] - truth.requests[:, 0]
    off = calls[(calls["tid"] == truth.victim) & (CLASS_OF_CALL[calls["call"]] == C_OFF_CPU)]["start_ns"].astype(np.int64)
    causes = []
    for number in slow:
        middle = truth.requests[number, 1]
        low, high = middle - WINDOW_BINS * BIN_NS // 2, middle + WINDOW_BINS * BIN_NS // 2
        inside = took[(truth.requests[:, 1] >= low) & (truth.requests[:, 1] < high)]
        switches = int(((off >= low) & (off < high)).sum())
        contended = np.percentile(inside, 99) > TIMES * np.median(inside) and switches >= SWITCHES
        causes.append("cpu_preempted" if contended else "")
    return causes


WAYS = {"correlation": strongest_correlation, "contention rule": contention_rule}
