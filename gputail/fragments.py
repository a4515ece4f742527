"""Rows to fragments: what a thread did between one wait for the GPU and the next, reduced to one row of sums.

In: CALL rows in order of their end, in batches of any size. Out: fragments (rows of the columns below), the atoms
from which requests are put together. All work per event is done here, on whole columns; what comes after costs per
fragment. Whether a wait ends a request is left to boundaries.py.

A fragment ends with a call that blocks until the GPU is done, or with the last of a run of queries if it found the
GPU done (a run is one wait, however many queries it takes). A *head* is a fragment of its own kind: work at the
fragment's beginning that goes to another stream than what follows, and which may belong to no request.
"""

from __future__ import annotations

import numpy as np

from gputail import events
from gputail.budget import (
    ASKS,
    BLOCKS,
    C_COPY,
    C_GRAPH,
    C_HTOD,
    C_LAUNCH,
    C_OFF_CPU,
    C_QUERY,
    CLASS_OF_CALL,
    CLASSES,
    IS_WORK,
    OFF_CPU,
    PART_OF_CLASS,
    PARTS,
    RUN_QUEUE,
    SYNC,
    WAIT_OF_CALL,
)  # fmt: skip
from gputail.rows import take

# Columns of a fragment. Those up to SUMS add up when two pieces of a fragment are joined.
P_FIRST = 0  # one column for each part of the budget (host stays 0: it is what remains)
N_CALLS = len(PARTS)
N_LAUNCHES, BLOCK_THREADS, HTOD_BYTES, DTOH_BYTES, COPY_BYTES = range(N_CALLS + 1, N_CALLS + 6)
SUMS = N_CALLS + 6
START, FIRST_END, FIRST_CLASS, LEAD_OFF_CPU, LEAD_RUN_QUEUE = range(SUMS, SUMS + 5)
END, LAST_CALL, LAST_CLASS, LAST_RESULT = range(SUMS + 5, SUMS + 9)
FIRST_WORK, FIRST_STREAM, LAST_WORK, LAST_STREAM = range(SUMS + 9, SUMS + 13)
FLAGS, FIRST_FLAGS, ENDS_BY = range(SUMS + 13, SUMS + 16)
COLUMNS = SUMS + 16

# Values of ENDS_BY.
OPEN, WAIT, HEAD = 0, 1, 2

# Silence after which a run of queries is over, and a thread that waited for the GPU is idle. Verdicts come later
# still, so waiting this long for the next call delays none.
SILENCE_NS = 300_000_000

# Rows of one thread that may wait for the call that encloses or follows them, and for how long.
MAX_PENDING = 128
MAX_PENDING_NS = 60_000_000_000
_PREEMPTED = (0, 256)
_MAX_THREADS = 4096

Fragment = list  # of COLUMNS integers


class Thread:
    """What is carried of a thread from batch to batch."""

    __slots__ = ("tgid", "tid", "open", "head_done", "last_end", "after_query")

    def __init__(self, tgid: int, tid: int) -> None:
        self.tgid, self.tid = tgid, tid
        self.open: Fragment | None = None
        self.head_done = False
        self.last_end = 0
        self.after_query = False


def join(first: Fragment, second: Fragment) -> Fragment:
    """One fragment from two pieces of it that follow each other."""
    joined = [a + b for a, b in zip(first[:SUMS], second[:SUMS], strict=True)]
    if first[LAST_CLASS] == C_QUERY and second[FIRST_CLASS] == C_QUERY:
        joined[SYNC] += second[START] - first[END] - second[LEAD_RUN_QUEUE]
    else:
        joined[OFF_CPU] += second[LEAD_OFF_CPU]
    joined[RUN_QUEUE] += second[LEAD_RUN_QUEUE]
    joined += first[START : START + 5]
    joined += second[END : END + 4]
    joined += first[FIRST_WORK : FIRST_WORK + 2] if first[FIRST_WORK] else second[FIRST_WORK : FIRST_WORK + 2]
    joined += second[LAST_WORK : LAST_WORK + 2] if second[LAST_WORK] else first[LAST_WORK : LAST_WORK + 2]
    joined += (first[FLAGS] | second[FLAGS], first[FIRST_FLAGS], second[ENDS_BY])
    return joined


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
        return _Reduction(rows, kind, firsts, threads, side).result()

    def _thread(self, key: int) -> Thread:
        thread = self.threads.get(key)
        if thread is None:
            if len(self.threads) >= _MAX_THREADS:
                for gone in sorted(self.threads, key=lambda k: self.threads[k].last_end)[: _MAX_THREADS // 4]:
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


class _Reduction:
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

    def result(self) -> list[tuple[Thread, list[Fragment]]]:
        closers = self._closers()
        heads = self._heads(closers)
        table = self._reduce(closers, heads)
        pieces = table.tolist()
        out = []
        begin_of = np.searchsorted(self.piece_begins, self.firsts).tolist() + [len(pieces)]
        for number, thread in enumerate(self.threads):
            out.append((thread, _carry_on(thread, pieces[begin_of[number] : begin_of[number + 1]], bool(self.head_before[number]))))
        return out

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
            if (carried is None and not thread.head_done) or (carried and _run_is_over(carried, self.kind[first], self.end[first])):
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
            cell = piece[copies] * 3 + (kind[copies] - np.uint8(C_HTOD))
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


def _run_is_over(carried: Fragment, next_class: int, next_end: int) -> bool:
    """Whether an open fragment ends with the query it last saw, now that the thread's next call is known."""
    if carried[LAST_CLASS] != C_QUERY or carried[LAST_RESULT] != 0:
        return False
    return next_class != C_QUERY or next_end - carried[END] > SILENCE_NS


def _carry_on(thread: Thread, pieces: list[Fragment], head_before: bool) -> list[Fragment]:
    """The thread's closed fragments, the first joined to what was open before; the last stays open if nothing ends it."""
    closed = []
    carried = thread.open
    if carried is not None and _run_is_over(carried, pieces[0][FIRST_CLASS], pieces[0][FIRST_END]):
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
