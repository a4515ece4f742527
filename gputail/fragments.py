"""Fragments: what a thread did between one wait for the GPU and the next, as one row of sums.

They are the atoms from which requests are put together: `reduction` makes them from columns of calls, `fragmenter`
keeps them going from batch to batch, `requests` joins them. A fragment ends with a call that blocks until the GPU is
done, or with the last of a run of queries if it found the GPU done (a run is one wait, however many queries it
takes). A *head* is a fragment of its own kind: work at the beginning that goes to another stream than what follows,
and which may belong to no request.
"""

from __future__ import annotations

from gputail.budget import C_QUERY, OFF_CPU, PARTS, RUN_QUEUE, SYNC

# Columns of a fragment. Those up to SUMS add up when two pieces of a fragment are joined.
N_CALLS = len(PARTS)  # before it, one column for each part of the budget (host stays 0: it is what remains)
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

Fragment = list  # of COLUMNS integers


class Thread:
    """What is carried of a thread from batch to batch."""

    __slots__ = ("tgid", "tid", "open", "head_done", "last_end")

    def __init__(self, tgid: int, tid: int) -> None:
        self.tgid, self.tid = tgid, tid
        self.open: Fragment | None = None
        self.head_done = False
        self.last_end = 0


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


def run_is_over(carried: Fragment, next_class: int, next_end: int) -> bool:
    """Whether an open fragment ends with the query it last saw, now that the thread's next call is known."""
    if carried[LAST_CLASS] != C_QUERY or carried[LAST_RESULT] != 0:
        return False
    return next_class != C_QUERY or next_end - carried[END] > SILENCE_NS
