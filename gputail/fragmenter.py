"""Rows to fragments, from batch to batch: what is open of each thread is carried on.

In: CALL rows in order of their end, in batches of any size. Out: the fragments they close, per thread. All work per
event is done on whole columns, here and in reduction.py; what comes after costs per fragment. Whether a wait ends a
request is left to boundaries.py.
"""

from __future__ import annotations

import numpy as np

from gputail import events
from gputail.budget import C_OFF_CPU, CLASS_OF_CALL
from gputail.fragments import END, ENDS_BY, FIRST_CLASS, FIRST_END, HEAD, OPEN, WAIT, Fragment, Thread, join, run_is_over
from gputail.reduction import Reduction
from gputail.rows import take

# Rows of one thread that may wait for the call that encloses or follows them, and for how long.
MAX_PENDING = 128
MAX_PENDING_NS = 60_000_000_000
MAX_THREADS = 2048


class Fragmenter:
    """Cuts the stream into fragments; `feed` returns for each thread with news its closed pieces, in order."""

    def __init__(self) -> None:
        self.threads: dict[int, Thread] = {}
        self._pending = events.no_calls()

    def feed(self, calls: np.ndarray) -> list[tuple[Thread, list[Fragment]]]:
        """Fragments that these rows close. What stays open is the thread's `open`."""
        if len(self._pending):
            calls = np.concatenate([self._pending, calls])
            self._pending = events.no_calls()
        if not len(calls):
            return []
        rows, keys, firsts = _by_thread(calls)
        call = rows["call"]
        kind = CLASS_OF_CALL[call]
        aside = (kind == C_OFF_CPU) | (rows["depth"] > 0)
        side = None
        if aside.any():
            rows, kind, firsts, keys, side = self._set_aside(rows, kind, aside, firsts, keys)
            if not len(rows):
                return []
        threads = [self._thread(key) for key in keys]
        return self._carried(threads, Reduction(rows, kind, firsts, threads, side))

    def _carried(self, threads: list[Thread], batch: Reduction) -> list[tuple[Thread, list[Fragment]]]:
        pieces = batch.pieces()
        heads = batch.head_before.tolist()
        return [(thread, _carry_on(thread, mine, head)) for thread, mine, head in zip(threads, pieces, heads, strict=True)]

    def _thread(self, key: int) -> Thread:
        thread = self.threads.get(key)
        if thread is None:
            if len(self.threads) >= MAX_THREADS:
                for gone in sorted(self.threads, key=lambda k: self.threads[k].last_end)[: MAX_THREADS // 4]:
                    del self.threads[gone]
            thread = self.threads[key] = Thread(key >> 32, key & 0xFFFFFFFF)
        return thread

    def _set_aside(
        self, rows: np.ndarray, kind: np.ndarray, aside: np.ndarray, firsts: np.ndarray, keys: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int], tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
        """Part the rows that are no calls of their own from the calls, and say which call each belongs before or in.

        Those whose call has not come yet wait for it: the last MAX_PENDING of a thread.
        """
        top = np.flatnonzero(~aside)
        side_rows = np.flatnonzero(aside)
        owner = np.searchsorted(top, side_rows)
        thread_of_side = np.searchsorted(firsts, side_rows, side="right")
        thread_of_top = np.searchsorted(firsts, top, side="right")
        found = owner < len(top)
        found[found] = thread_of_top[owner[found]] == thread_of_side[found]
        group = np.where(found, owner, len(top) + thread_of_side)
        ends = events.end_ns(rows).astype(np.int64)
        until = ends[np.where(found, top[np.minimum(owner, len(top) - 1)], 0)] if len(top) else np.zeros(len(owner), np.int64)
        until = np.where(found, until, ends.max())
        kept = (_rank_from_end(group) < MAX_PENDING) & (until - ends[side_rows] <= MAX_PENDING_NS)
        self._pending = take(rows, side_rows[~found & kept])
        use = found & kept
        counts = np.bincount(thread_of_top, minlength=len(firsts) + 1)[1:]
        present = np.flatnonzero(counts)
        new_firsts = np.concatenate([[0], np.cumsum(counts[present])[:-1]]).astype(np.int64)
        side = (take(rows, side_rows[use]), kind[side_rows[use]], owner[use])
        return take(rows, top), kind[top], new_firsts, [keys[i] for i in present], side if use.any() else None


def _rank_from_end(group: np.ndarray) -> np.ndarray:
    """For each row how many rows of its group come after it."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    rank = np.empty(len(group), np.int64)
    rank[order] = np.searchsorted(ordered, ordered, side="right") - 1 - np.arange(len(group))
    return rank


def _by_thread(calls: np.ndarray) -> tuple[np.ndarray, list[int], np.ndarray]:
    """The rows sorted by thread, the key of each thread, and where its rows begin."""
    key = calls["tgid"].astype(np.uint64) << np.uint64(32) | calls["tid"]
    begins = np.concatenate([[0], np.flatnonzero(key[1:] != key[:-1]) + 1])
    if len(begins) == 1:
        return calls, [int(key[0])], begins
    runs = key[begins]
    unique, of_run = np.unique(runs, return_inverse=True)
    if len(unique) == len(runs) and np.all(runs[1:] > runs[:-1]):
        return calls, [int(k) for k in runs], begins
    order = np.argsort(of_run, kind="stable")
    lengths = np.diff(np.append(begins, len(calls)))
    sorted_lengths = lengths[order]
    offsets = np.concatenate([[0], np.cumsum(sorted_lengths)[:-1]])
    index = np.arange(len(calls)) + np.repeat(begins[order] - offsets, sorted_lengths)
    first_run = np.searchsorted(of_run[order], np.arange(len(unique)))
    return take(calls, index), [int(k) for k in unique], offsets[first_run]


def _carry_on(thread: Thread, pieces: list[Fragment], head_before: bool) -> list[Fragment]:
    """The thread's closed fragments, the first joined to what was open before; the last stays open if nothing ends it."""
    closed = []
    carried = thread.open
    if carried is not None and run_is_over(carried, pieces[0][FIRST_CLASS], pieces[0][FIRST_END]):
        carried[ENDS_BY] = WAIT
        closed.append(carried)
        carried, thread.head_done = None, False
    elif carried is not None and head_before:
        carried[ENDS_BY] = HEAD
        closed.append(carried)
        carried, thread.head_done = None, True
    for piece in pieces:
        if carried is not None:
            piece = join(carried, piece)
        if piece[ENDS_BY] == OPEN:
            carried = piece
            continue
        closed.append(piece)
        thread.head_done = piece[ENDS_BY] == HEAD
        carried = None
    thread.open = carried
    thread.last_end = pieces[-1][END]
    return closed
