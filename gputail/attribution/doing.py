"""What a rank did while others waited for it, against what it usually does until then.

In: rows of its process between two collectives. Out: sums, and words for what there was more of.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from gputail.attribution.case import GREW
from gputail.attribution.cpu_preempted import was_runnable
from gputail.budget import (
    ALLOC,
    C_COPY,
    C_GRAPH,
    C_HTOD,
    C_LAUNCH,
    C_OFF_CPU,
    CLASS_OF_CALL,
    COLLECTIVE,
    COPY,
    LAUNCH,
    MODULE,
    PART_OF_CLASS,
    SYNC,
)  # fmt: skip

LARGE_BYTES = 1 << 20  # less than so much more is copied in no time
# Parts of a stretch and what is said of a rank that spent more than usual in them.
WAITING = "waiting"
_PARTS = {COPY: "copying", ALLOC: "allocating", MODULE: "loading kernels", SYNC: WAITING, COLLECTIVE: WAITING, LAUNCH: "launching"}
PREEMPTED, BLOCKED, HOST = "preempted", "blocked in the host", "computing"
# Whoever was kept off the CPU for this share of what it came late is late for that, wherever in its calls it happened.
MOSTLY = 0.5


def profile(rows: np.ndarray, tid: int, start_ns: int, end_ns: int) -> dict[str, int]:
    """Sums over a stretch of a rank: times (ns) of the thread `tid` by words, and what its process gave the GPU.

    The times sum to the stretch's length, but for preemptions inside calls, which are in both.
    """
    kind = CLASS_OF_CALL[rows["call"]]
    is_launch, is_copy = kind == C_LAUNCH, (kind >= C_HTOD) & (kind <= C_COPY)
    threads = rows["size"][is_launch].astype(np.float64) * rows["block"][is_launch]
    inside_nccl = rows["depth"][is_launch] > 0
    out = {
        "launches": int((~inside_nccl).sum() + (kind == C_GRAPH).sum()),
        "threads": int(threads[~inside_nccl].sum()),
        "bytes": int(rows["size"][is_copy].sum()),
    }
    begin = np.maximum(rows["start_ns"].astype(np.int64), start_ns)
    end = np.minimum((rows["start_ns"] + rows["duration_ns"]).astype(np.int64), end_ns)
    took = np.maximum(end - begin, 0)
    mine = rows["tid"] == tid
    calls = mine & (kind != C_OFF_CPU) & (rows["depth"] == 0)
    for part, word in _PARTS.items():
        out[word] = out.get(word, 0) + int(took[calls & (PART_OF_CLASS[kind] == part)].sum())
    off = mine & (kind == C_OFF_CPU)
    runnable = off & was_runnable(rows)
    woken = np.maximum(rows["size"].astype(np.int64), begin)
    out[PREEMPTED] = int(took[runnable].sum() + np.maximum(end - woken, 0)[off & ~runnable & (rows["size"] > 0)].sum())
    starts, ends = rows["start_ns"][calls], (rows["start_ns"] + rows["duration_ns"])[calls]
    outside = np.array([not ((starts <= at) & (ends > at)).any() for at in rows["start_ns"][off & ~runnable]], bool)
    out[BLOCKED] = int(took[off & ~runnable][outside].sum())
    out[HOST] = max(end_ns - start_ns - sum(out[word] for word in (*_PARTS.values(), PREEMPTED, BLOCKED) if word in out), 0)
    return out


def growth(now: dict[str, int], usually: list[dict[str, int]]) -> float:
    """How many times its usual work a rank gave the GPU: launches, threads or bytes, whichever grew most."""
    grew = 1.0
    for counter, least in (("launches", 1), ("threads", 1), ("bytes", LARGE_BYTES)):
        before = median(one[counter] for one in usually)
        if now[counter] - before >= least:
            grew = max(grew, now[counter] / max(before, 1))
    return grew


def what_instead(now: dict[str, int], usually: list[dict[str, int]], late_ns: int) -> str | None:
    """In words, what made a rank late; None where nothing accounts for a fair part of it."""
    if not usually:
        return None
    before = {word: median(one[word] for one in usually) for word in now}
    grew = {word: now[word] - before[word] for word in now}
    if grew[PREEMPTED] >= MOSTLY * late_ns:
        return PREEMPTED
    more = f"{now['launches']} launches against {before['launches']:.0f}"
    if now["launches"] >= GREW * before["launches"] + 1:
        more_work = more
    elif now["threads"] >= GREW * before["threads"] + 1:
        more_work = "larger kernels"
    else:
        more_work = ""
    copies = grew["bytes"] >= LARGE_BYTES and now["bytes"] >= GREW * before["bytes"]
    word = max((*dict.fromkeys(_PARTS.values()), BLOCKED, HOST), key=lambda word: grew[word])
    if grew[word] < late_ns / 4 or word == WAITING:
        # The host was as fast as ever, or waited: its GPU was busy.
        return more_work or ("copying" if copies else WAITING if grew[WAITING] >= late_ns / 4 else None)
    # Copies of the usual size that took longer waited for the work before them.
    if more_work and (word in (HOST, "launching") or (word == _PARTS[COPY] and not copies)):
        return more_work
    return word
