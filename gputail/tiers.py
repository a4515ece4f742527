"""Probe tiers: which of a process's calls were seen when.

In: rows with the number TIER_CALL, one for each change (start_ns: from when on; tgid: of which process, 0 for all; handle: the
state). Out: the state that held over a time. Which a process is to have is decided by probes/governor.py.

A *state* is a tier, and whether the time off the CPU is not recorded at that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import pairwise

import numpy as np

from gputail.probes.table import TIER_CALL

# In order: each sees what those before it see, and costs more. CHANGING: between two of them, or several in one time.
TIERS = ("light", "launch", "full", "changing")
LIGHT, LAUNCH, FULL, CHANGING = range(len(TIERS))

_WITHOUT_OFF_CPU = 8


def without(tier: int) -> int:
    """The state of a tier in which the time off the CPU is not recorded."""
    return tier | _WITHOUT_OFF_CPU


def tier_of(state: int) -> int:
    return state & ~_WITHOUT_OFF_CPU


def sees_off_cpu(state: int) -> bool:
    return not state & _WITHOUT_OFF_CPU


def sees_launches(state: int) -> bool:
    return tier_of(state) in (LAUNCH, FULL)


def sees_all_of(state: int, other: int) -> bool:
    """Whether nothing is seen in the other state that is not in this one."""
    return tier_of(state) >= tier_of(other) and (sees_off_cpu(state) or not sees_off_cpu(other))


MAX_PROCESSES = 4096
MAX_CHANGES = 64  # of one process
_NEVER = 1 << 62


class Tiers:
    """The changes of every process. Without any, everything was seen."""

    def __init__(self) -> None:
        self._changes: OrderedDict[int, deque[tuple[int, int]]] = OrderedDict()
        self._of_all = FULL

    def learn(self, calls: np.ndarray) -> np.ndarray:
        """Take in a batch's changes; the rows without them."""
        is_change = calls["call"] == TIER_CALL
        if not is_change.any():
            return calls
        for row in calls[is_change]:
            tgid, state = int(row["tgid"]), int(row["handle"])
            if tier_of(state) > CHANGING:
                continue  # none of ours
            if not tgid:
                self._of_all = state
                continue
            changes = self._changes.setdefault(tgid, deque(maxlen=MAX_CHANGES))
            changes.append((int(row["start_ns"]), state))
            self._changes.move_to_end(tgid)
            if len(self._changes) > MAX_PROCESSES:
                self._changes.popitem(last=False)
        return calls[~is_change]

    def between(self, tgid: int, start_ns: int, end_ns: int) -> int:
        """The state of a process over that time; CHANGING where it was not one alone."""
        changes = self._changes.get(tgid)
        if not changes:
            return self._of_all
        latest = changes[-1]
        if latest[0] <= start_ns:
            return latest[1]
        held = {state for (begin, state), (end, _) in pairwise((*changes, (_NEVER, CHANGING))) if begin < end_ns and end > start_ns}
        if changes[0][0] > start_ns:
            held.add(self._of_all)
        return held.pop() if len(held) == 1 else CHANGING
