"""Fragments to requests: the GPU work that one thread does for one unit of service.

In: batches of CALL rows and their watermark. Out: requests, each with a budget whose parts sum to its wall time, in
order per thread; `release_ns` says at what time of the stream a request became known, so that later stages can take
the requests of all threads in an order that does not depend on how the stream was cut into batches. Threads that
never wait for the GPU, or that only wait, have no requests.

While a thread's structure is unknown its fragments are held back, at most HOLD_FRAGMENTS of them or HOLD_NS, and cut
in one go once it is learned.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from gputail import events
from gputail.boundaries import UNKNOWN_NEXT, Boundaries, Kind
from gputail.budget import (
    C_COPY,
    C_DTOH,
    C_HTOD,
    C_NONE,
    C_QUERY,
    C_SYNC,
    CLASS_OF_CALL,
    CLASSES,
    HOST,
    OFF_CPU,
    PARTS,
    RUN_QUEUE,
    boundary,
)  # fmt: skip
from gputail.fragmenter import Fragmenter
from gputail.fragments import (
    BLOCK_THREADS,
    COPY_BYTES,
    DTOH_BYTES,
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
    SILENCE_NS,
    START,
    SUMS,
    WAIT,
    Fragment,
    Thread,
)  # fmt: skip
from gputail.probes.table import BY_NUMBER, PER_KERNEL
from gputail.tiers import CHANGING, FULL, LIGHT, Tiers, sees_launches, tier_of

HOLD_FRAGMENTS = 64
HOLD_NS = 2_000_000_000
MAX_FRAGMENTS = 4096  # of one request; more are joined into one
RECENT = 64  # requests of a thread from which its usual opening and shape are known
# How a request begins of which only the wait was seen.
UNSEEN = "unseen"
# Classes of calls that are not seen then.
_PER_KERNEL = frozenset(int(CLASS_OF_CALL[function.number]) for function in BY_NUMBER.values() if function.category in PER_KERNEL)


@dataclass(slots=True)
class Request:
    """One request. parts: ns by `budget.PARTS`; block_threads: threads of all launched kernels, grids times blocks."""

    tgid: int
    tid: int
    start_ns: int
    end_ns: int
    release_ns: int
    boundary: str
    shape: str
    calls: int
    launches: int
    parts: tuple[int, ...]
    block_threads: int
    htod_bytes: int
    dtoh_bytes: int
    copy_bytes: int
    stream: int  # of the last work before the wait that ended it
    incomplete: bool
    state: int = FULL  # of the probes while it ran, see tiers.py

    @property
    def tier(self) -> int:
        return tier_of(self.state)

    @property
    def are_launches_seen(self) -> bool:
        return sees_launches(self.state)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


# A fragment, the kind of the wait that ended it and what that looks like while launches are not seen, the gap (ns) after.
_Entry = tuple[Fragment, Kind, Kind, int]


class _Learned:
    """What is known of a thread's requests, while its launches are seen or while they are not."""

    __slots__ = ("boundaries", "openings", "shapes")

    def __init__(self) -> None:
        self.boundaries = Boundaries()
        self.openings: deque[int] = deque(maxlen=RECENT)
        self.shapes: deque[str] = deque(maxlen=RECENT)


class _Lane:
    """One thread's way from fragments to requests."""

    __slots__ = ("thread", "is_seen", "learned", "waiting", "held", "current", "deadline")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.is_seen = True  # whether its launches are
        self.learned = {True: _Learned(), False: _Learned()}  # by is_seen
        self.waiting: list[Fragment] = []  # closed, the gap after the last not yet known
        self.held: list[_Entry] = []  # until the structure is learned
        self.current: list[_Entry] = []  # of the request that has not ended
        self.deadline: int | None = None  # by when the structure must be learned

    @property
    def boundaries(self) -> Boundaries:
        return self.learned[self.is_seen].boundaries

    def ends(self, entry: _Entry) -> bool:
        """Whether it ends a request; while launches are seen, that tells of the times when they are not."""
        fragment, kind, unseen, gap = entry
        if fragment[ENDS_BY] == HEAD:
            return False
        ended = self.boundaries.ends(kind, gap)
        if self.is_seen:
            self.learned[False].boundaries.tell(unseen, ended)
        return ended

    @property
    def openings(self) -> deque[int]:
        return self.learned[self.is_seen].openings

    @property
    def shapes(self) -> deque[str]:
        return self.learned[self.is_seen].shapes


class Requests:
    """Cuts the stream into requests."""

    def __init__(self, tiers: Tiers | None = None) -> None:
        """tiers: what is known of the probes' tiers; without, everything was seen."""
        self._tiers = tiers or Tiers()
        self._fragmenter = Fragmenter()
        self._lanes: dict[Thread, _Lane] = {}
        self._restless: set[Thread] = set()  # threads that the passing of time alone may bring forward

    def feed(self, calls: np.ndarray, watermark_ns: int) -> list[Request]:
        """The requests that became known by `watermark_ns`, in order per thread."""
        out: list[Request] = []
        for thread, closed in self._fragmenter.feed(calls):
            lane = self._lanes.get(thread)
            if lane is None:
                lane = self._lanes[thread] = _Lane(thread)
            lane.waiting += closed
            self._advance(lane, out)
            self._restless.add(thread)
        for thread in list(self._restless):
            self._pass_time(self._lanes[thread], watermark_ns, out)
        if len(self._lanes) > len(self._fragmenter.threads):
            alive = set(self._fragmenter.threads.values())
            for thread in [thread for thread in self._lanes if thread not in alive]:
                self._pass_time(self._lanes.pop(thread), 1 << 62, out)
                self._restless.discard(thread)
        return out

    def finish(self) -> list[Request]:
        """The requests that were complete when the stream ended."""
        out: list[Request] = []
        for lane in self._lanes.values():
            self._pass_time(lane, 1 << 62, out)
        return out

    def _advance(self, lane: _Lane, out: list[Request]) -> None:
        """Take up every fragment whose successor is known."""
        waiting, thread = lane.waiting, lane.thread
        following = waiting[1:]
        if thread.open is not None:
            following.append(thread.open)
        for fragment, after in zip(waiting, following, strict=False):
            if fragment[ENDS_BY] == HEAD:
                self._take(lane, (fragment, (0, 0, 0), (0, 0, 0), 0), 0, out)
                continue
            before = fragment[LAST_WORK]
            if after[FIRST_END] - fragment[END] > SILENCE_NS:
                then, unseen_then, gap, release = UNKNOWN_NEXT, UNKNOWN_NEXT, SILENCE_NS, fragment[END] + SILENCE_NS
            else:
                then, unseen_then = after[FIRST_CLASS], _first_but_launches(after)
                gap, release = max(after[START] - fragment[END], 0), after[FIRST_END]
                fragment[FLAGS] |= after[FIRST_FLAGS] & events.AFTER_GAP
            call = fragment[LAST_CALL]
            self._take(lane, (fragment, (before, call, then), (_last_but_launches(fragment), call, unseen_then), gap), release, out)
        del waiting[: len(following)]

    def _pass_time(self, lane: _Lane, watermark_ns: int, out: list[Request]) -> None:
        """What the silence up to the watermark tells."""
        thread = lane.thread
        tail = thread.open
        if tail is not None and tail[LAST_CLASS] == C_QUERY and tail[LAST_RESULT] == 0 and tail[END] + SILENCE_NS < watermark_ns:
            tail[ENDS_BY] = WAIT
            thread.open, thread.head_done = None, False
            lane.waiting.append(tail)
            self._advance(lane, out)
        if lane.waiting and thread.open is None and lane.waiting[-1][END] + SILENCE_NS < watermark_ns:
            last = lane.waiting.pop()
            if last[ENDS_BY] == HEAD:
                lane.waiting.append(last)
            else:
                kind = (last[LAST_WORK], last[LAST_CALL], UNKNOWN_NEXT)
                unseen = (_last_but_launches(last), last[LAST_CALL], UNKNOWN_NEXT)
                self._take(lane, (last, kind, unseen, SILENCE_NS), last[END] + SILENCE_NS, out)
        if lane.deadline is not None and lane.deadline < watermark_ns:
            self._learn(lane, lane.deadline, out)
        if lane.deadline is None and not lane.waiting and tail is None:
            self._restless.discard(thread)

    def _take(self, lane: _Lane, entry: _Entry, release: int, out: list[Request]) -> None:
        fragment, kind, _, gap = entry
        tier = tier_of(self._tiers.between(lane.thread.tgid, fragment[START], fragment[END]))
        if tier != CHANGING and (tier != LIGHT) != lane.is_seen:
            if lane.held:
                self._learn(lane, release or fragment[END], out)
            lane.deadline = None
            lane.is_seen = tier != LIGHT
        boundaries = lane.boundaries
        if fragment[ENDS_BY] != HEAD and tier != CHANGING:
            if lane.deadline is not None and release > lane.deadline:
                self._learn(lane, lane.deadline, out)
            if not boundaries.learned and lane.deadline is None:
                lane.deadline = fragment[START] + HOLD_NS
            boundaries.observe(kind, gap, fragment[N_LAUNCHES], fragment[HTOD_BYTES])
        if not boundaries.learned:
            lane.held.append(entry)
            if len(boundaries) >= HOLD_FRAGMENTS or len(lane.held) >= 2 * HOLD_FRAGMENTS:
                self._learn(lane, release or fragment[END], out)
            return
        lane.current.append(entry)
        if lane.ends(entry):
            fragments, lane.current = [entry[0] for entry in lane.current], []
            self._emit(lane, fragments, release, out)
        elif boundaries.is_surprised:
            # What seemed to go on without an end is cut anew from what was learned of it.
            boundaries.forget()
            lane.held, lane.current = lane.current, []
            self._learn(lane, release, out)
        elif len(lane.current) >= MAX_FRAGMENTS:
            lane.current = [(_sum([entry[0] for entry in lane.current]), *entry[1:])]

    def _learn(self, lane: _Lane, release: int, out: list[Request]) -> None:
        lane.deadline = None
        lane.boundaries.learn()
        held, lane.held = lane.held, []
        cut: list[list[Fragment]] = []
        for entry in held:
            lane.current.append(entry)
            if lane.ends(entry):
                cut.append([entry[0] for entry in lane.current])
                lane.current = []
        for fragments in cut:
            lane.openings.append(_opening(fragments)[FIRST_STREAM])
            lane.shapes.append(_shape(fragments))
        for fragments in cut:
            self._emit(lane, fragments, release, out)

    def _emit(self, lane: _Lane, fragments: list[Fragment], release: int, out: list[Request]) -> None:
        opening = _opening(fragments)[FIRST_STREAM]
        if fragments[0][ENDS_BY] == HEAD and len(fragments) > 1 and len(lane.openings) >= 8:
            # Work for a stream on which this thread's requests do not usually begin, before what they begin with: it was
            # queued beside the request, not for it. (Where requests do begin so, it is usual and stays.)
            usual = Counter(lane.openings)
            if 4 * usual[opening] < len(lane.openings) <= 2 * usual[_opening(fragments[1:])[FIRST_STREAM]]:
                fragments = fragments[1:]
        lane.openings.append(opening)
        whole = fragments[0] if len(fragments) == 1 else _sum(fragments)
        state = self._tiers.between(lane.thread.tgid, whole[START], whole[END])
        if not whole[FIRST_WORK] and not (tier_of(state) == LIGHT and _may_have_launched(whole, lane)):
            return
        shape = _shape(fragments)
        lane.shapes.append(shape)
        if 10 * lane.shapes.count(shape) < len(lane.shapes):
            # A single unusual one is judged beside its thread's usual ones.
            shape = Counter(lane.shapes).most_common(1)[0][0]
        parts, contradictory = _parts(whole)
        out.append(
            Request(
                tgid=lane.thread.tgid,
                tid=lane.thread.tid,
                start_ns=whole[START],
                end_ns=whole[END],
                release_ns=release,
                boundary=boundary(whole[LAST_CALL]),
                shape=shape,
                calls=whole[N_CALLS],
                launches=whole[N_LAUNCHES],
                parts=parts,
                block_threads=whole[BLOCK_THREADS],
                htod_bytes=whole[HTOD_BYTES],
                dtoh_bytes=whole[DTOH_BYTES],
                copy_bytes=whole[COPY_BYTES],
                stream=whole[LAST_STREAM],
                incomplete=contradictory or bool(whole[FLAGS] & events.AFTER_GAP) or state == CHANGING,
                state=state,
            )  # fmt: skip
        )


def _opening(fragments: list[Fragment]) -> Fragment:
    """The first fragment with work in it; the first of all if none has."""
    return next((fragment for fragment in fragments if fragment[FIRST_WORK] != C_NONE), fragments[0])


def _last_but_launches(fragment: Fragment) -> int:
    """The class of the last work in a fragment if launches are not seen."""
    last = fragment[LAST_WORK]
    return last if last not in _PER_KERNEL else _copied(fragment)


def _first_but_launches(fragment: Fragment) -> int:
    """The class of its first call if launches are not seen."""
    first = fragment[FIRST_CLASS]
    if first not in _PER_KERNEL:
        return first
    return _copied(fragment) or C_SYNC


def _copied(fragment: Fragment) -> int:
    """The class of a fragment's copies; none where there are several, since it is not known which came when."""
    found = [kind for kind, column in ((C_HTOD, HTOD_BYTES), (C_DTOH, DTOH_BYTES), (C_COPY, COPY_BYTES)) if fragment[column]]
    return found[0] if len(found) == 1 else C_NONE


def _shape(fragments: list[Fragment]) -> str:
    """What a request looks like, whatever its size: how it begins and how it ends."""
    first = _opening(fragments)[FIRST_WORK]
    return f"{CLASSES[first] if first else UNSEEN}..{boundary(fragments[-1][LAST_CALL])}"


def _may_have_launched(whole: Fragment, lane: _Lane) -> bool:
    """Whether a wait alone, seen while launches are not, is likely to be for work of its thread.

    It is not where the thread is known for never giving the GPU anything, and hardly where it only asks.
    """
    known = lane.learned[True]
    has_worked = any(not shape.startswith(UNSEEN) for shape in known.shapes)
    return whole[LAST_CLASS] == C_SYNC and (has_worked or not len(known.boundaries))


def _sum(fragments: list[Fragment]) -> Fragment:
    """One fragment from several that follow each other; the time between two of them is part of it."""
    first, last = fragments[0], fragments[-1]
    whole = [sum(column) for column in zip(*(fragment[:SUMS] for fragment in fragments), strict=True)]
    whole[OFF_CPU] += sum(fragment[LEAD_OFF_CPU] for fragment in fragments[1:])
    whole[RUN_QUEUE] += sum(fragment[LEAD_RUN_QUEUE] for fragment in fragments[1:])
    whole += last[SUMS:]
    for column in (START, FIRST_END, FIRST_CLASS, LEAD_OFF_CPU, LEAD_RUN_QUEUE, FIRST_FLAGS):
        whole[column] = first[column]
    opening = _opening(fragments)
    whole[FIRST_WORK], whole[FIRST_STREAM] = opening[FIRST_WORK], opening[FIRST_STREAM]
    closing = next((fragment for fragment in reversed(fragments) if fragment[LAST_WORK] != C_NONE), last)
    whole[LAST_WORK], whole[LAST_STREAM] = closing[LAST_WORK], closing[LAST_STREAM]
    whole[FLAGS] = 0
    for fragment in fragments:
        whole[FLAGS] |= fragment[FLAGS]
    return whole


def _parts(whole: Fragment) -> tuple[tuple[int, ...], bool]:
    """The budget (ns by PARTS) of a request, and whether its rows contradicted each other (calls that overlap).

    The parts sum to the wall time even then: what is too much is taken from the largest ones.
    """
    parts = [max(part, 0) for part in whole[: len(PARTS)]]
    contradictory = parts != whole[: len(PARTS)]
    parts[HOST] = 0
    parts[HOST] = whole[END] - whole[START] - sum(parts)
    while parts[HOST] < 0:
        contradictory = True
        largest = max(range(1, len(PARTS)), key=lambda part: parts[part])
        taken = min(parts[largest], -parts[HOST])
        if not taken:
            break
        parts[largest] -= taken
        parts[HOST] += taken
    return tuple(parts), contradictory
