"""Which waits end a request: learned per thread from what usually follows each kind of wait.

In: one observation per wait, in order. Out: yes or no for each. A wait's kind is the last work before it, the
function that waited and the class of the call after it. A gap alone decides nothing: a thread can be stalled for
20 ms after a wait in the middle of a request, and a loaded server leaves no gap at all between two. What tells is
how long the gap after a wait of that kind *usually* is, and which kinds follow which.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

from gputail.budget import C_DTOH, C_HTOD, C_QUERY, C_SYNC
from gputail.fragments import SILENCE_NS

UNKNOWN_NEXT = 255  # the thread stayed silent

WINDOW = 256  # waits of the recent past that decisions are made from
RELEARN_EVERY = 64
# A kind seen less often is judged by its relatives.
MIN_SEEN = 3
# Where nothing is known of a wait, a pause this long is taken for idleness.
DEFAULT_IDLE_NS = 1_000_000
# Two modes of one kind's gaps are told apart if their means (of logarithms to base 2) differ by this and nothing lies between.
MODES_APART = 3.0
VALLEY = 1.0

ALWAYS, NEVER = 0.0, math.inf  # as thresholds of the gap


@dataclass
class Wait:
    """One wait as it was observed; `launches` and `htod_bytes` are those of what the thread did next."""

    kind: tuple[int, int, int]
    gap_ns: int
    launches: int = -1
    htod_bytes: int = 0


class Boundaries:
    """What is known of one thread's waits."""

    __slots__ = ("_waits", "_until_relearn", "_idle_from", "_of_pair", "_default", "learned")

    def __init__(self) -> None:
        self._waits: deque[Wait] = deque(maxlen=WINDOW)
        self._until_relearn = RELEARN_EVERY
        self._idle_from: dict[tuple[int, int, int], float] = {}
        self._of_pair: dict[tuple[int, int], float] = {}
        self._default = float(DEFAULT_IDLE_NS)
        self.learned = False

    def __len__(self) -> int:
        return len(self._waits)

    def observe(self, kind: tuple[int, int, int], gap_ns: int, launches: int, htod_bytes: int) -> None:
        """Take in a wait of `kind` (last work before it, call number, class of the next call) and the gap after it.

        launches and htod_bytes are those of the fragment that this wait ended.
        """
        if self._waits:
            self._waits[-1].launches, self._waits[-1].htod_bytes = launches, htod_bytes
        self._waits.append(Wait(kind, gap_ns))
        if self.learned:
            self._until_relearn -= 1
            if self._until_relearn <= 0:
                self.learn()

    def ends(self, kind: tuple[int, int, int], gap_ns: int) -> bool:
        """Whether a wait of this kind, followed by this gap, ended a request."""
        before, wait, following = kind
        if following in (C_SYNC, C_QUERY) and gap_ns < DEFAULT_IDLE_NS:
            return False
        idle_from = self._idle_from.get(kind)
        if idle_from is None:
            idle_from = self._of_pair.get((before, wait))
        if idle_from is None:
            idle_from = NEVER if before == C_HTOD and gap_ns < SILENCE_NS else self._default
        return gap_ns >= idle_from

    def learn(self) -> None:
        """Decide anew from the window."""
        self.learned = True
        self._until_relearn = RELEARN_EVERY
        self._idle_from, self._of_pair = {}, {}
        groups: dict[tuple[int, int, int], list[Wait]] = {}
        for wait in self._waits:
            groups.setdefault(wait.kind, []).append(wait)
        enough = max(MIN_SEEN, len(self._waits) // 50)
        known = {kind: waits for kind, waits in groups.items() if len(waits) >= enough}
        if not known:
            return
        modes = {kind: _modes([wait.gap_ns for wait in waits]) for kind, waits in known.items()}
        typical = {kind: mode[1] for kind, mode in modes.items()}
        score = {kind: typical[kind] * _likelihood(kind) for kind in known}
        best = max(known, key=lambda kind: (score[kind], kind))
        follower = _usual_followers([wait.kind for wait in self._waits])
        for kind, waits in known.items():
            threshold = modes[kind][0]
            if threshold and _same_work(waits, threshold):
                threshold = ALWAYS
            if kind == best:
                self._idle_from[kind] = threshold
                continue
            idle_like = typical[kind] >= DEFAULT_IDLE_NS and score[kind] * 4 >= score[best]
            successor = follower.get(kind)
            inner = successor in score and score[successor] > score[kind] and not idle_like  # type: ignore[index]
            comparable = score[kind] * 4 >= score[best] or (kind[2] == best[2] and kind[0] != C_HTOD)
            self._idle_from[kind] = threshold if comparable and not inner else NEVER
        for pair in {kind[:2] for kind in known}:
            votes: Counter[float] = Counter()
            for kind, waits in known.items():
                if kind[:2] == pair:
                    votes[self._idle_from[kind]] += len(waits)
            self._of_pair[pair] = max(votes, key=lambda threshold: (votes[threshold], -threshold))
        inner_gaps = [typical[kind] for kind in known if self._idle_from[kind] == NEVER]
        self._default = max(DEFAULT_IDLE_NS, math.sqrt(max(inner_gaps) * typical[best])) if inner_gaps else DEFAULT_IDLE_NS


def _likelihood(kind: tuple[int, int, int]) -> float:
    """How likely a request ends so, gaps being equal: results were fetched; an upload only begins something."""
    return {C_HTOD: 0.1, C_DTOH: 2.0}.get(kind[0], 1.0) * (0.1 if kind[2] in (C_SYNC, C_QUERY) else 1.0)


def _modes(gaps_ns: list[int]) -> tuple[float, float]:
    """(threshold, typical gap): where the gaps have two modes, what divides them and the upper mode's median.

    One mode gives ALWAYS as threshold and the median, and so do two that are both idleness. Otsu's method on the
    logarithms of the gaps.
    """
    ordered = sorted(max(gap, 1000) for gap in gaps_ns)
    middle = float(ordered[len(ordered) // 2])
    logs = [math.log2(gap) for gap in ordered]
    count, total = len(logs), sum(logs)
    best, best_spread, below = 0, 0.0, 0.0
    for at in range(1, count):
        below += logs[at - 1]
        apart = (total - below) / (count - at) - below / at
        spread = at * (count - at) * apart * apart
        if spread > best_spread:
            best, best_spread = at, spread
    if not 2 <= best <= count - 2:
        return ALWAYS, middle
    low_mean, high_mean = sum(logs[:best]) / best, sum(logs[best:]) / (count - best)
    if high_mean - low_mean < MODES_APART or logs[best] - logs[best - 1] < VALLEY or ordered[best // 2] >= DEFAULT_IDLE_NS:
        return ALWAYS, middle
    return math.sqrt(ordered[best - 1] * ordered[best]), float(ordered[(best + count) // 2])


def _same_work(waits: list[Wait], threshold: float) -> bool:
    """Whether what follows a long gap is the same as what follows a short one: then each was a request of its own."""
    after_long = sorted((w.launches, w.htod_bytes) for w in waits if w.launches >= 0 and w.gap_ns >= threshold)
    after_short = sorted((w.launches, w.htod_bytes) for w in waits if w.launches >= 0 and w.gap_ns < threshold)
    if not after_long or not after_short:
        return False
    one, other = after_long[len(after_long) // 2], after_short[len(after_short) // 2]
    return all(abs(a - b) <= 0.1 * max(a, b) for a, b in zip(one, other))


def _usual_followers(kinds: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """For each kind the other kind that nearly always comes next, if there is one."""
    following: dict[tuple[int, int, int], Counter] = {}
    for kind, after in zip(kinds, kinds[1:]):
        following.setdefault(kind, Counter())[after] += 1
    usual = {}
    for kind, counts in following.items():
        after, count = counts.most_common(1)[0]
        if after != kind and count >= 0.8 * sum(counts.values()):
            usual[kind] = after
    return usual
