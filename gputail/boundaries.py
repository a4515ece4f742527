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
from itertools import pairwise

from gputail.budget import C_DTOH, C_HTOD, C_QUERY, C_SYNC
from gputail.fragments import SILENCE_NS

UNKNOWN_NEXT = 255  # the thread stayed silent

WINDOW = 256  # waits of the recent past that decisions are made from
RELEARN_EVERY = 64
# A kind seen less often is judged by its relatives.
MIN_SEEN = 3
# What was told of a kind is believed unless this share of it was told otherwise.
UNSURE = 0.1
# Where nothing is known of a wait, a pause this long is taken for idleness.
DEFAULT_IDLE_NS = 1_000_000
# Two modes of one kind's gaps are told apart if their means (of logarithms to base 2) differ by this and nothing lies between.
MODES_APART = 3.0
VALLEY = 1.0

# After so many waits of unknown kinds and no end of a request, the thread does something else than it did.
SURPRISE = 32
_WAITS = (C_SYNC, C_QUERY)

ALWAYS, NEVER = 0.0, math.inf  # as thresholds of the gap


Kind = tuple[int, int, int]  # last work before the wait, number of the waiting function, class of the next call


@dataclass(slots=True)
class Wait:
    """One wait as it was observed; `launches` and `htod_bytes` are those of what the thread did next."""

    kind: Kind
    gap_ns: int
    launches: int = -1
    htod_bytes: int = 0


class Boundaries:
    """What is known of one thread's waits."""

    __slots__ = ("_waits", "_until_relearn", "_idle_from", "_of_pair", "_goes_on_with", "_default", "_strange", "_told", "learned")

    def __init__(self) -> None:
        self._waits: deque[Wait] = deque(maxlen=WINDOW)
        self._until_relearn = RELEARN_EVERY
        self._idle_from: dict[Kind, float] = {}
        self._of_pair: dict[tuple[int, int], tuple[float, float]] = {}  # threshold of most, lowest threshold
        self._goes_on_with: set[int] = set()  # classes of calls that come after waits within a request, and never begin one
        self._default = float(DEFAULT_IDLE_NS)
        self._told: dict[Kind, list[int]] = {}  # how many went on and how many ended a request, where that was known for certain
        self._strange = 0  # waits of unknown kinds since a request last ended
        self.learned = False

    def __len__(self) -> int:
        return len(self._waits)

    def observe(self, kind: Kind, gap_ns: int, launches: int, htod_bytes: int) -> None:
        """Take in a wait of `kind` and the gap after it.

        launches and htod_bytes are those of the fragment that this wait ended.
        """
        if self._waits:
            self._waits[-1].launches, self._waits[-1].htod_bytes = launches, htod_bytes
        self._waits.append(Wait(kind, gap_ns))
        if self.learned:
            self._until_relearn -= 1
            if self._until_relearn <= 0:
                self.learn()

    def tell(self, kind: Kind, ended: bool) -> None:
        """Whether a wait ended a request that looks of this kind where less is seen than when that was decided."""
        counts = self._told.setdefault(kind, [0, 0])
        counts[ended] += 1
        if sum(counts) > WINDOW:
            counts[:] = [count // 2 for count in counts]

    def _is_told(self, kind: Kind) -> bool | None:
        counts = self._told.get(kind)
        if counts is None:
            # Silence after a wait that sometimes ends requests is such an end.
            is_end = kind[2] == UNKNOWN_NEXT and any(kind[:2] == other[:2] and self._is_told(other) for other in self._told)
            return is_end or None
        if max(counts) < MIN_SEEN or min(counts) > UNSURE * max(counts):
            return None
        return counts[True] > counts[False]

    def ends(self, kind: Kind, gap_ns: int) -> bool:
        """Whether a wait of this kind, followed by this gap, ended a request."""
        told = self._is_told(kind)
        if told is not None:
            self._strange *= not told
            return told
        idle_from = self._idle_from.get(kind)
        if idle_from is None:
            self._strange += 1
            idle_from = self._inferred(kind, gap_ns)
        if kind[2] in _WAITS and gap_ns < DEFAULT_IDLE_NS or gap_ns < idle_from:
            return False
        self._strange = 0
        return True

    def _inferred(self, kind: Kind, gap_ns: int) -> float:
        """The threshold for a kind that was not seen often enough."""
        of_pair = self._of_pair.get(kind[:2])
        if of_pair is not None:
            # Silence after a wait that sometimes ends requests is such an end.
            return of_pair[1] if kind[2] == UNKNOWN_NEXT else of_pair[0]
        is_within = kind[0] == C_HTOD or kind[2] in self._goes_on_with
        return NEVER if is_within and gap_ns < SILENCE_NS else self._default

    @property
    def is_surprised(self) -> bool:
        """Whether the thread has long done nothing but what it never did before."""
        return self._strange >= SURPRISE

    def forget(self) -> None:
        """Let go of what the thread did before it began to do something else."""
        while len(self._waits) > self._strange:
            self._waits.popleft()
        self._strange = 0

    def learn(self) -> None:
        """Decide anew from the window."""
        self.learned = True
        self._until_relearn = RELEARN_EVERY
        self._idle_from, self._of_pair, self._goes_on_with = {}, {}, set()
        known: dict[Kind, list[Wait]] = {}
        for wait in self._waits:
            known.setdefault(wait.kind, []).append(wait)
        enough = max(MIN_SEEN if len(self._waits) >= 8 * MIN_SEEN else 1, len(self._waits) // 50)
        known = {kind: waits for kind, waits in known.items() if len(waits) >= enough}
        if not known:
            return
        typical = {kind: sorted(wait.gap_ns for wait in waits)[len(waits) // 2] for kind, waits in known.items()}
        score = {kind: typical[kind] * _likelihood(kind) for kind in known}
        best = _best(known, typical, score)
        follower = _usual_followers([wait.kind for wait in self._waits])
        for kind, waits in known.items():
            threshold = _threshold([wait.gap_ns for wait in waits])
            if threshold and _same_work([w for w in waits if w.gap_ns >= threshold], [w for w in waits if w.gap_ns < threshold]):
                threshold = ALWAYS
            if kind == best or (kind[2] == UNKNOWN_NEXT and kind[0] != C_HTOD):
                self._idle_from[kind] = threshold
                continue
            # A look at the GPU long after the usual end of a request does not belong to it.
            later = kind[:2] == best[:2] and typical[kind] * 2 >= typical[best]
            idle_like = typical[kind] >= DEFAULT_IDLE_NS and (score[kind] * 4 >= score[best] or later)
            successor = follower.get(kind)
            inner = successor is not None and score.get(successor, 0) > score[kind] and not idle_like
            same_role = kind[0] != C_HTOD and (kind[2] == best[2] or _same_work(waits, known[best]))
            comparable = score[kind] * 4 >= score[best] or same_role or idle_like
            self._idle_from[kind] = threshold if comparable and not inner else NEVER
        for pair in {kind[:2] for kind in known}:
            votes: Counter[float] = Counter()
            for kind, waits in known.items():
                if kind[:2] == pair:
                    votes[self._idle_from[kind]] += len(waits)
            self._of_pair[pair] = (max(votes, key=lambda threshold: (votes[threshold], -threshold)), min(votes))
        begins = {kind[2] for kind, threshold in self._idle_from.items() if threshold != NEVER}
        self._goes_on_with = {kind[2] for kind, threshold in self._idle_from.items() if threshold == NEVER} - begins
        inner_gaps = [typical[kind] for kind in known if self._idle_from[kind] == NEVER]
        self._default = max(DEFAULT_IDLE_NS, math.sqrt(max(inner_gaps) * typical[best])) if inner_gaps else DEFAULT_IDLE_NS


def _best(known: dict[Kind, list[Wait]], typical: dict[Kind, int], score: dict[Kind, float]) -> Kind:
    """The kind that ends requests if any does.

    A wait that the thread stays silent after says so of itself, but nothing of how long idleness is where there is
    less of it: it is the measure only if no other kind of wait is followed by idleness.
    """
    others = [kind for kind in known if kind[2] != UNKNOWN_NEXT]
    silent = [kind for kind in known if kind[2] == UNKNOWN_NEXT]
    if silent and not any(typical[kind] >= DEFAULT_IDLE_NS and kind[0] != C_HTOD for kind in others):
        others = silent
    return max(others, key=lambda kind: (score[kind], kind))


def _likelihood(kind: Kind) -> float:
    """How likely a request ends so, gaps being equal: results were fetched; an upload only begins something."""
    return {C_HTOD: 0.1, C_DTOH: 2.0}.get(kind[0], 1.0) * (0.1 if kind[2] in _WAITS else 1.0)


def _threshold(gaps_ns: list[int]) -> float:
    """What divides the gaps if they have two modes, ALWAYS if not, or if both are idleness.

    Otsu's method on the logarithms of the gaps.
    """
    ordered = sorted(max(gap, 1000) for gap in gaps_ns)
    logs = [math.log2(gap) for gap in ordered]
    count, total = len(logs), sum(logs)
    best, best_spread, below = 0, 0.0, 0.0
    for at in range(1, count):
        below += logs[at - 1]
        apart = (total - below) / (count - at) - below / at
        spread = at * (count - at) * apart * apart
        if spread > best_spread:
            best, best_spread = at, spread
    if not 2 <= best <= count - 2 or ordered[best // 2] >= DEFAULT_IDLE_NS:
        return ALWAYS
    low_mean, high_mean = sum(logs[:best]) / best, sum(logs[best:]) / (count - best)
    if high_mean - low_mean < MODES_APART or logs[best] - logs[best - 1] < VALLEY:
        return ALWAYS
    return math.sqrt(ordered[best - 1] * ordered[best])


def _same_work(some: list[Wait], others: list[Wait]) -> bool:
    """Whether what the thread does after the ones is what it does after the others: then both end requests or neither."""
    one, other = (sorted((w.launches, w.htod_bytes) for w in waits if w.launches >= 0) for waits in (some, others))
    if not one or not other:
        return False
    return all(abs(a - b) <= 0.1 * max(a, b) for a, b in zip(one[len(one) // 2], other[len(other) // 2], strict=True))


def _usual_followers(kinds: list[Kind]) -> dict[Kind, Kind]:
    """For each kind the other kind that nearly always comes next, if there is one."""
    following: dict[Kind, Counter[Kind]] = {}
    for kind, after in pairwise(kinds):
        following.setdefault(kind, Counter())[after] += 1
    usual = {}
    for kind, counts in following.items():
        after, count = counts.most_common(1)[0]
        if after != kind and count >= 0.8 * sum(counts.values()):
            usual[kind] = after
    return usual
