"""A request's time as lanes of cells: what its thread did, and beside it the work of whoever made it slow.

In go the calls around one request, out come lanes of a given number of cells, each cell with the one kind of thing that took most
of its time. How a kind looks is left to surfaces, and so is how many cells there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gputail import events
from gputail.attribution.outstanding import GpuWork, gpu_work
from gputail.budget import (
    ALLOC,
    C_OFF_CPU,
    CLASS_OF_CALL,
    COLLECTIVE,
    COPY,
    HOST,
    IS_WORK,
    LAUNCH,
    MODULE,
    OFF_CPU,
    OTHER,
    PART_OF_CLASS,
    PARTS,
    RUN_QUEUE,
    SYNC,
)
from gputail.rows import take
from gputail.tail import RequestRecord

# Kinds of cells: first the parts of a request's budget, by their numbers there, then what another's work is.
NOTHING, KERNELS, COPIES, ON_CPU = (len(PARTS) + n for n in range(4))
KINDS = len(PARTS) + 4
WORDS = {
    HOST: "on the CPU, outside the driver",
    RUN_QUEUE: "waiting for a CPU",
    OFF_CPU: "asleep",
    LAUNCH: "launch",
    COPY: "copy, and its wait for the GPU",
    ALLOC: "alloc or free",
    MODULE: "module load",
    SYNC: "waiting for the GPU",
    COLLECTIVE: "collective",
    OTHER: "other call",
    KERNELS: "kernels given to the GPU and not yet done",
    COPIES: "copies not yet done",
    ON_CPU: "on the CPU that the request's thread waits for",
}
MAX_OTHERS = 3
CELLS = 192  # of timelines that are made before it is known how much room there is
HOST_WEIGHT = 0.3
_RUNNABLE = (0, 256)  # prev_state of a thread that was preempted


@dataclass(frozen=True)
class Lane:
    """kinds: the kind of each cell, a byte each; pid: whose work, None for the request's own calls; partly: rows were left out."""

    name: str
    pid: int | None
    kinds: bytes
    partly: bool = False


@dataclass(frozen=True)
class Timeline:
    """Lanes over [start_ns, end_ns), all of the same number of cells; the first is the request's own."""

    start_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Around:
    """The calls around one request. own: rows of its thread; others: of culprits and of the other threads of its process.

    own_partly, others_partly: whether some were left out, there being too many.
    """

    record: RequestRecord
    own: np.ndarray
    others: np.ndarray
    own_partly: bool = False
    others_partly: bool = False

    def timeline(self, cells: int) -> Timeline:
        """The request in so many cells."""
        record = self.record
        edges = record.start_ns + np.arange(cells + 1) * (record.end_ns - record.start_ns) / cells
        lanes = [Lane("calls", None, _bytes(_own_kinds(self.own, edges)), self.own_partly), *self._others(edges)]
        return Timeline(record.start_ns, record.end_ns, tuple(lanes))

    def _others(self, edges: np.ndarray) -> list[Lane]:
        record, lanes = self.record, []
        for cause, pid in culprits(record):
            if cause == "cpu_preempted":
                kinds = _running_instead(self.own, pid, edges)
            else:
                of_pid = self.others["tgid"] == pid
                beside = take(self.others, of_pid)
                if pid == record.pid:  # what the request itself has on the GPU is not what it waited for
                    beside = take(beside, ~_on_streams_of(self.own, beside))
                kinds = _gpu_kinds(gpu_work(beside, record.start_ns, record.end_ns, waits_alone=pid != record.pid), edges)
            if (kinds != NOTHING).any():
                name = "own, beside" if pid == record.pid else f"pid {pid}"
                lanes.append(Lane(name, pid, _bytes(kinds), self.others_partly))
        return lanes


def culprits(record: RequestRecord) -> list[tuple[str, int]]:
    """(cause, pid) of those whose work is worth a lane, largest contribution first, each pid once."""
    found: dict[int, str] = {}
    for c in record.contributions:
        pid = record.pid if c.cause in ("blocking_sync", "sibling_kernel") else c.culprit_pid
        if pid is not None:
            found.setdefault(pid, c.cause)
    return [(cause, pid) for pid, cause in list(found.items())[:MAX_OTHERS]]


def _coverage(start_ns: np.ndarray, end_ns: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How much (ns) of each cell the intervals cover, each counting by itself."""
    if not len(start_ns):
        return np.zeros(len(edges) - 1)
    start, end = start_ns.astype(np.float64), end_ns.astype(np.float64)
    upto = np.array([np.clip(np.minimum(end, edge) - start, 0, None).sum() for edge in edges])
    return np.diff(upto)


def _own_kinds(own: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The kind that took most of each cell, split as budget.py splits a request."""
    cells = len(edges) - 1
    covered = np.zeros((KINDS, cells))
    end = events.end_ns(own)
    is_off = CLASS_OF_CALL[own["call"]] == C_OFF_CPU
    part = PART_OF_CLASS[CLASS_OF_CALL[own["call"]]]
    outer = ~is_off & (own["depth"] == 0)
    for kind in np.unique(part[outer]).tolist():
        mine = outer & (part == kind)
        covered[kind] += _coverage(own["start_ns"][mine], end[mine], edges)
    in_calls = covered.sum(axis=0)
    off, off_end = take(own, is_off), end[is_off]
    preempted, woken = np.isin(off["handle"], _RUNNABLE), off["size"]
    runnable = np.where(preempted, off["start_ns"], np.where((woken > off["start_ns"]) & (woken < off_end), woken, off_end))
    covered[RUN_QUEUE] = _coverage(runnable, off_end, edges)
    # A sleep within a call is the call's own way of waiting.
    covered[OFF_CPU] = np.maximum(_coverage(off["start_ns"], runnable, edges) - in_calls, 0)
    width = np.diff(edges)
    host = width - in_calls - covered[OFF_CPU] - np.maximum(covered[RUN_QUEUE] - in_calls, 0)
    covered[HOST] = HOST_WEIGHT * host  # a cell of short launches with the program between them is about the launches
    covered[RUN_QUEUE] *= 1.0001  # wherever it happens, in a call or outside of one
    return np.argmax(covered, axis=0)


def _gpu_kinds(work: Sequence[GpuWork], edges: np.ndarray) -> np.ndarray:
    """KERNELS or COPIES where such work was outstanding for at least half of a cell."""
    covered = np.zeros((KINDS, len(edges) - 1))
    for kind, spans in ((KERNELS, [w for w in work if not w.is_copy]), (COPIES, [w for w in work if w.is_copy])):
        covered[kind] = _coverage(np.array([w.start_ns for w in spans]), np.array([w.end_ns for w in spans]), edges)
    covered[NOTHING] = np.diff(edges) / 2
    return np.argmax(covered, axis=0)


def _running_instead(own: np.ndarray, tid: int, edges: np.ndarray) -> np.ndarray:
    """ON_CPU where the thread waited for a CPU on which `tid` ran."""
    off = take(own, (CLASS_OF_CALL[own["call"]] == C_OFF_CPU) & (own["stream"] == tid))
    end, woken = events.end_ns(off), off["size"]
    start = np.where((woken > off["start_ns"]) & (woken < end) & ~np.isin(off["handle"], _RUNNABLE), woken, off["start_ns"])
    covered = _coverage(start, end, edges)
    return np.where(covered >= np.diff(edges) / 2, ON_CPU, NOTHING)


def _on_streams_of(own: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Which rows are work on a stream that the request itself gives work to."""
    streams = np.unique(own["stream"][IS_WORK[CLASS_OF_CALL[own["call"]]]])
    return IS_WORK[CLASS_OF_CALL[rows["call"]]] & np.isin(rows["stream"], streams)


def _bytes(kinds: np.ndarray) -> bytes:
    return kinds.astype(np.uint8).tobytes()


def runs(kinds: bytes) -> list[tuple[int, int, int]]:
    """(kind, first cell, cell behind the last) of each stretch of equal cells."""
    found, first = [], 0
    for kind, run in groupby(kinds):
        stop = first + len(list(run))
        found.append((kind, first, stop))
        first = stop
    return found
