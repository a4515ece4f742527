"""Request records against what the simulated programs logged of themselves: cut right, named right, blamed wrongly.

In: records as `RequestRecord.as_dict` gives them, and a truth. Out: a `Judgement`. Used by the demo, the tests and the
accuracy benchmark; what was run is left to `scenario`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# What is injected -> the causes that name it rightly. Whoever holds the interpreter lock, and is on the same CPU, preempts.
RIGHT: Mapping[str, frozenset[str]] = {
    "cpuhog": frozenset({"cpu_preempted"}),
    "devsync": frozenset({"blocking_sync"}),
    "gdevsync": frozenset({"blocking_sync"}),
    "gil": frozenset({"host_blocked", "cpu_preempted"}),
    "morework": frozenset({"more_work"}),
    "pageable": frozenset({"memcpy"}),
    "ptxjit": frozenset({"module_load"}),
    "alloc": frozenset({"memory_alloc"}),
    "module": frozenset({"module_load"}),
    "gmorework": frozenset({"more_work"}),
    "compute": frozenset({"host_compute"}),
    "gcompute": frozenset({"host_compute"}),
    "gsleep": frozenset({"host_blocked"}),
    "ggil": frozenset({"host_blocked", "cpu_preempted"}),
    "galloc": frozenset({"memory_alloc"}),
    "gptxjit": frozenset({"module_load"}),
    "gpageable": frozenset({"memcpy"}),
    "ghog": frozenset({"cpu_preempted"}),
    "sleep": frozenset({"host_blocked"}),
    "backpressure": frozenset({"launch_backpressure"}),
    "gside": frozenset({"sibling_kernel"}),
    "xgemm": frozenset({"foreign_kernel"}),
    "xcopy": frozenset({"foreign_copy"}),
}
HAS_CULPRIT = frozenset({"xgemm", "xcopy"})
SLOW = 1.25  # an injected request counts when it took this many times the clean median
SLACK_NS = 1000


class Truth(Protocol):
    """What the programs logged: (n, 2) arrays of start and end (CLOCK_MONOTONIC ns), and pids (0: there was none)."""

    @property
    def label(self) -> str: ...
    @property
    def victim(self) -> int: ...
    @property
    def aggressor(self) -> int: ...
    @property
    def requests(self) -> np.ndarray: ...
    @property
    def faults(self) -> np.ndarray: ...
    @property
    def bursts(self) -> np.ndarray: ...


@dataclass
class Judgement:
    """Counts of requests. clean, slow: as logged; one_to_one: seen as exactly one record; flagged, right, named: of the slow."""

    label: str
    requests: int = 0
    one_to_one: int = 0
    clean: int = 0
    slow: int = 0
    flagged: int = 0
    right: int = 0
    named: int | None = None  # with the right process as culprit; None where there is none to name
    blamed: int = 0  # clean ones to which a cause was given that somebody else would be called for
    wrong: dict[str, int] = field(default_factory=dict)  # first causes of slow ones that were not right


def judge(records: Iterable[Mapping[str, Any]], truth: Truth) -> Judgement:
    """Compare the victim's records with its own log. Its requests run on its main thread, one after another."""
    mine = sorted((record for record in records if record["tid"] == truth.victim), key=lambda record: record["start_ns"])
    starts = np.array([record["start_ns"] for record in mine], np.int64)
    ends = np.array([record["end_ns"] for record in mine], np.int64)
    kind = truth.label.rpartition("+")[2]
    right = RIGHT.get(kind, frozenset())
    result = Judgement(truth.label, requests=len(truth.requests), named=0 if kind in HAS_CULPRIT else None)
    injected = np.zeros(len(truth.requests), bool)
    for begin, end in np.concatenate([truth.bursts.reshape(-1, 2), truth.faults.reshape(-1, 2)]):
        injected |= (truth.requests[:, 0] < end) & (truth.requests[:, 1] > begin)
    took = truth.requests[:, 1] - truth.requests[:, 0]
    usual = np.median(took[~injected]) if (~injected).any() else 0
    for (begin, end), is_injected, duration in zip(truth.requests.tolist(), injected, took):
        inside = mine[np.searchsorted(ends, begin) : np.searchsorted(starts, end)]
        result.one_to_one += len(inside) == 1 and inside[0]["start_ns"] >= begin - SLACK_NS and inside[0]["end_ns"] <= end + SLACK_NS
        outliers = [record for record in inside if record["outlier"]]
        if not is_injected:
            result.clean += 1
            result.blamed += any(record["cause"] in _BLAMING for record in outliers)
        elif right and duration > SLOW * usual:
            result.slow += 1
            result.flagged += bool(outliers)
            worst = max(outliers, key=lambda record: record["excess_ns"] or 0, default=None)
            cause = worst["cause"] if worst else "not flagged"
            if worst and cause in right:
                result.right += 1
                if result.named is not None:
                    result.named += any(c["cause"] in right and c["culprit_pid"] == truth.aggressor for c in worst["contributions"])
            else:
                result.wrong[cause] = result.wrong.get(cause, 0) + 1
    return result


_BLAMING = frozenset().union(*RIGHT.values()) - {"more_work", "host_compute"}
