"""One batch's calls to pieces of fragments, a column at a time.

In: the calls of one batch, sorted by thread, and beside them the rows that are no calls of their own (stretches off the
CPU, calls made inside others). Out: rows of the columns of fragments.py. Nothing here loops over events.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gputail.budget import (
    ASKS,
    BLOCKS,
    C_COPY,
    C_GRAPH,
    C_HTOD,
    C_LAUNCH,
    C_OFF_CPU,
    C_QUERY,
    CLASSES,
    IS_WORK,
    OFF_CPU,
    PART_OF_CLASS,
    RUN_QUEUE,
    SYNC,
    WAIT_OF_CALL,
)
from gputail.fragments import (
    BLOCK_THREADS,
    COLUMNS,
    COPY_BYTES,
    END,
    ENDS_BY,
    FIRST_CLASS,
    FIRST_END,
    FIRST_FLAGS,
    FIRST_STREAM,
    FIRST_WORK,
    FLAGS,
    HEAD,
    HTOD_BYTES,
    LAST_CALL,
    LAST_CLASS,
    LAST_RESULT,
    LAST_STREAM,
    LAST_WORK,
    LEAD_OFF_CPU,
    LEAD_RUN_QUEUE,
    N_CALLS,
    N_LAUNCHES,
    OPEN,
    SILENCE_NS,
    START,
    WAIT,
    Fragment,
    Thread,
    run_is_over,
)

_PREEMPTED = (0, 256)


class Reduction:
    """One batch's calls (sorted by thread, none nested) on their way to fragments."""

    def __init__(
        self, rows: np.ndarray, kind: np.ndarray, firsts: np.ndarray, threads: list[Thread],
        side: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    ) -> None:  # fmt: skip
        self.rows, self.kind, self.firsts, self.threads, self.side = rows, kind, firsts, threads, side
        self.n = len(rows)
        self.start = rows["start_ns"].astype(np.int64)
        self.duration = rows["duration_ns"].astype(np.int64)
        self.end = self.start + self.duration
        self.call = rows["call"]
        self.work = np.flatnonzero(IS_WORK[kind])
        self.work_stream = rows["stream"][self.work].view(np.int64)
        self.stops = np.append(firsts[1:], self.n)

    def pieces(self) -> list[list[Fragment]]:
        """For each thread the pieces of its fragments, in order; the first goes on with what the thread has open.

        `head_before` then says of each thread whether what it has open is a head that ends before these rows.
        """
        closers = self._closers()
        rows = self._reduce(closers, self._heads(closers)).tolist()
        begins = np.searchsorted(self.piece_begins, self.firsts).tolist() + [len(rows)]
        return [rows[first:stop] for first, stop in pairwise(begins)]

    def _closers(self) -> np.ndarray:
        """Rows (ascending) that end a fragment: blocking waits, and the last of a run of queries if it found all done."""
        wait = WAIT_OF_CALL[self.call]
        waits = np.flatnonzero(wait)
        asking = waits[wait[waits] == ASKS]
        self.queries = asking
        if not len(asking):
            return waits
        following = np.minimum(asking + 1, self.n - 1)
        last_of_thread = np.zeros(self.n, bool)
        last_of_thread[self.stops - 1] = True
        goes_on = (wait[following] == ASKS) & (self.end[following] - self.end[asking] <= SILENCE_NS)
        over = ~goes_on & ~last_of_thread[asking] & (self.rows["result"][asking] == 0)
        return np.sort(np.concatenate([waits[wait[waits] == BLOCKS], asking[over]]))

    def _heads(self, closers: np.ndarray) -> np.ndarray:
        """Rows before which a head ends: the first of a fragment that goes to another stream than its beginning."""
        work, stream, firsts = self.work, self.work_stream, self.firsts
        splits = []
        # Threads whose first fragment here is the rest of one that has its head already.
        headless = np.zeros(len(firsts), bool)
        self.head_before = headless.copy()
        for number, thread in enumerate(self.threads):
            carried, first = thread.open, firsts[number]
            if (carried is None and not thread.head_done) or (carried and run_is_over(carried, self.kind[first], self.end[first])):
                continue
            headless[number] = thread.head_done
            if thread.head_done or carried is None or not carried[FIRST_WORK]:
                continue
            at, next_closer = np.searchsorted(work, first), np.searchsorted(closers, first)
            until = min(closers[next_closer] if next_closer < len(closers) else self.n, self.stops[number] - 1)
            if at < len(work) and work[at] <= until and stream[at] != carried[FIRST_STREAM]:
                splits.append(int(work[at]))
                headless[number] = True
                self.head_before[number] = work[at] == first
        changes = np.flatnonzero(stream[1:] != stream[:-1]) + 1
        if len(changes):
            # A fragment is told by its thread and by how many closers come before it.
            before, row = work[changes - 1], work[changes]
            thread_of, fragment = np.searchsorted(firsts, row, side="right") - 1, np.searchsorted(closers, row)
            same = (np.searchsorted(firsts, before, side="right") - 1 == thread_of) & (np.searchsorted(closers, before) == fragment)
            same &= ~(headless[thread_of] & (np.searchsorted(closers, firsts[thread_of]) == fragment))
            row, thread_of, fragment = row[same], thread_of[same], fragment[same]
            if len(row):
                keep = np.ones(len(row), bool)
                keep[1:] = (thread_of[1:] != thread_of[:-1]) | (fragment[1:] != fragment[:-1])
                splits += row[keep].tolist()
        return np.array(sorted(splits), np.int64)

    def _reduce(self, closers: np.ndarray, heads: np.ndarray) -> np.ndarray:
        n, kind, start, end = self.n, self.kind, self.start, self.end
        after = closers + 1
        begins = np.unique(np.concatenate([self.firsts, after[after < n], heads]).astype(np.int64))
        self.piece_begins = begins
        count = len(begins)
        stops = np.append(begins[1:], n)
        lasts = stops - 1
        out = np.zeros((count, COLUMNS), np.int64)
        piece = np.repeat(np.arange(count), stops - begins)
        width = len(CLASSES)
        cell = piece * width + kind
        counts = np.bincount(cell, minlength=count * width).reshape(count, width)
        times = np.bincount(cell, weights=self.duration, minlength=count * width).reshape(count, width)
        for number in np.flatnonzero(counts.any(axis=0)):
            out[:, PART_OF_CLASS[number]] += times[:, number].astype(np.int64)
        out[:, N_CALLS] = stops - begins
        out[:, N_LAUNCHES] = counts[:, C_LAUNCH] + counts[:, C_GRAPH]
        launched = _block_threads(self.rows, kind)
        out[:, BLOCK_THREADS] = np.add.reduceat(launched, begins)
        copies = np.flatnonzero((kind >= C_HTOD) & (kind <= C_COPY))
        if len(copies):
            sizes = _bounded(self.rows["size"][copies])
            cell = piece[copies] * 3 + kind[copies].astype(np.int64) - C_HTOD
            out[:, HTOD_BYTES : COPY_BYTES + 1] = np.bincount(cell, weights=sizes, minlength=count * 3).reshape(count, 3)
        out[:, START], out[:, FIRST_END], out[:, FIRST_CLASS] = start[begins], end[begins], kind[begins]
        out[:, END], out[:, LAST_CALL], out[:, LAST_CLASS] = end[lasts], self.call[lasts], kind[lasts]
        out[:, LAST_RESULT] = self.rows["result"][lasts]
        self._work_of(out, begins, stops)
        flags = self.rows["flags"]
        if flags.any():
            out[:, FLAGS] = np.bitwise_or.reduceat(flags, begins)
            out[:, FIRST_FLAGS] = flags[begins]
        ends_head = np.zeros(n + 1, bool)
        ends_head[heads] = True
        ends_head[self.firsts] = False  # what ends there is the carried piece of that thread, not the piece before
        closes = np.zeros(n, bool)
        closes[closers] = True
        out[:, ENDS_BY] = np.where(closes[lasts], WAIT, np.where(ends_head[stops], HEAD, OPEN))
        self._polling(out, piece)
        if self.side is not None:
            self._side(out, piece, begins)
        return out

    def _work_of(self, out: np.ndarray, begins: np.ndarray, stops: np.ndarray) -> None:
        work, kind = self.work, self.kind
        if not len(work):
            return
        first = np.searchsorted(work, begins)
        last = np.searchsorted(work, stops) - 1
        has = last >= first
        out[has, FIRST_WORK], out[has, FIRST_STREAM] = kind[work[first[has]]], self.work_stream[first[has]]
        out[has, LAST_WORK], out[has, LAST_STREAM] = kind[work[last[has]]], self.work_stream[last[has]]

    def _polling(self, out: np.ndarray, piece: np.ndarray) -> None:
        """What lies between two queries of a run is waiting, too."""
        queries = self.queries
        if not len(queries):
            return
        later = queries[1:][(queries[1:] == queries[:-1] + 1) & (piece[queries[1:]] == piece[queries[:-1]])]
        np.add.at(out[:, SYNC], piece[later], self.start[later] - self.end[later - 1])

    def _side(self, out: np.ndarray, piece: np.ndarray, begins: np.ndarray) -> None:
        assert self.side is not None
        rows, kind, owner = self.side
        nested = kind != C_OFF_CPU
        if nested.any():
            inner, of = rows[nested], piece[owner[nested]]
            inner_kind = kind[nested]
            np.add.at(out[:, N_CALLS], of, 1)
            np.add.at(out[:, N_LAUNCHES], of, (inner_kind == C_LAUNCH) | (inner_kind == C_GRAPH))
            np.add.at(out[:, BLOCK_THREADS], of, _block_threads(inner, inner_kind))
            np.bitwise_or.at(out[:, FLAGS], of, inner["flags"])
            for column, number in enumerate(range(C_HTOD, C_COPY + 1)):
                mine = inner_kind == number
                np.add.at(out[:, HTOD_BYTES + column], of[mine], _bounded(inner["size"][mine]).astype(np.int64))
        off = ~nested
        if off.any():
            self._off_cpu(out, piece, begins, rows[off], owner[off])

    def _off_cpu(self, out: np.ndarray, piece: np.ndarray, begins: np.ndarray, rows: np.ndarray, owner: np.ndarray) -> None:
        left = rows["start_ns"].astype(np.int64)
        back = left + rows["duration_ns"].astype(np.int64)
        same = np.zeros(len(rows), bool)
        same[1:] = owner[1:] == owner[:-1]
        left[1:] = np.where(same[1:], np.maximum(left[1:], back[:-1]), left[1:])
        call_start = self.start[owner]
        inside = left >= call_start
        leads = np.isin(owner, self.firsts)
        before = np.where(leads, np.array([self.threads[i].last_end for i in np.searchsorted(self.firsts, owner, side="right") - 1]), 0)
        before = np.where(leads, before, self.end[np.maximum(owner - 1, 0)])
        low = np.maximum(left, np.where(inside, call_start, before))
        high = np.minimum(back, np.where(inside, self.end[owner], call_start))
        span = np.maximum(high - low, 0)
        woken = rows["size"].astype(np.int64)
        preempted = np.isin(rows["handle"], _PREEMPTED)
        waited = np.where(preempted, span, np.where(woken > 0, np.clip(high - np.maximum(woken, low), 0, span), 0))
        slept = span - waited
        of = piece[owner]
        in_call = np.flatnonzero(inside)
        np.add.at(out, (of[in_call], PART_OF_CLASS[self.kind[owner[in_call]]]), -waited[in_call])
        np.add.at(out[:, RUN_QUEUE], of[in_call], waited[in_call])
        first_of_piece = begins[of] == owner
        lead = np.flatnonzero(~inside & first_of_piece)
        np.add.at(out[:, LEAD_RUN_QUEUE], of[lead], waited[lead])
        np.add.at(out[:, LEAD_OFF_CPU], of[lead], slept[lead])
        between = ~inside & ~first_of_piece
        polling = between & (self.kind[owner] == C_QUERY) & (self.kind[np.maximum(owner - 1, 0)] == C_QUERY)
        rest = np.flatnonzero(between)
        np.add.at(out[:, RUN_QUEUE], of[rest], waited[rest])
        rest = np.flatnonzero(between & ~polling)
        np.add.at(out[:, OFF_CPU], of[rest], slept[rest])
        rest = np.flatnonzero(polling)
        np.add.at(out[:, SYNC], of[rest], -waited[rest])


def _bounded(sizes: np.ndarray) -> np.ndarray:
    """Sizes as floats, capped where only nonsense lies beyond, so that sums of them stay exact integers."""
    return np.minimum(sizes, 1 << 44).astype(np.float64)


def _block_threads(rows: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Threads (int64) each kernel launch asks for, its grid times its block; 0 for other calls."""
    threads = np.minimum(rows["size"], 1 << 40).astype(np.int64) * np.minimum(rows["block"], 2048)
    threads *= kind == C_LAUNCH
    return np.minimum(threads, 1 << 44)
