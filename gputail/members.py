"""A communicator, its traced ranks, the collectives that each came to, and how all that looks in a snapshot. Plain data.

What is learned of them from rows, and when, is left to communicators.py.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from gputail.drift import Lateness
from gputail.probes import table

# Entries of a rank that are compared with those of another, to find out which rounds they are; and how close (in times of what lies
# between two of them) they must be on average.
ALIGNED = 32
CLOSE = 0.25
KEPT = 512  # entries of one function that are remembered of a rank
# A collective that has not finished for so long is shown.
OPEN_NS = 1_000_000_000
GRAPH_LAUNCH = 8  # stands for the function of collectives that come out of a graph


@dataclass(frozen=True)
class Entry:
    """A rank came (ns) to a collective; the call that brought it returned at `end_ns`."""

    come_ns: int
    end_ns: int
    tid: int


@dataclass(frozen=True)
class Round:
    """One collective: who came and when. `mine` and `entry` are the asking rank's; `others` has those of the others that came."""

    communicator: Communicator
    function: int
    number: int
    mine: Member
    entry: Entry
    others: dict[Member, Entry]

    @property
    def last(self) -> Member | None:
        """Who of the others came last, if after this rank; None where it came last itself, or nobody else is traced."""
        late = max(self.others, key=lambda member: self.others[member].come_ns, default=None)
        return late if late is not None and self.others[late].come_ns > self.entry.come_ns else None

    @property
    def late_ns(self) -> int:
        """By how much the last to come was later than the one before."""
        times = sorted((self.entry.come_ns, *(entry.come_ns for entry in self.others.values())))
        return times[-1] - times[-2] if len(times) > 1 else 0


class Sequence:
    """A rank's entries of one function, in order; the last KEPT of them.

    is_aligned: which rounds they are is known. It is not where records were lost before them, until times have told.
    """

    __slots__ = ("count", "entries", "is_aligned")

    def __init__(self, is_aligned: bool = True) -> None:
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.is_aligned = is_aligned

    def add(self, entry: Entry) -> None:
        self.count += 1
        self.entries.append(entry)

    def at(self, number: int) -> Entry | None:
        """The entry of that number, from 0; None where it has not come or is not known."""
        index = number - self.count + len(self.entries)
        return self.entries[index] if self.is_aligned and 0 <= index < len(self.entries) else None

    def align(self, reference: Sequence) -> None:
        """Find out by the times of another rank's entries which rounds the last ALIGNED of these are, if that is without doubt.

        Ranks come to a round at about the same time, since none can be a whole collective ahead of another.
        """
        mine = np.array([entry.come_ns for entry in self.entries], np.int64)[-ALIGNED:]
        theirs = np.array([entry.come_ns for entry in reference.entries], np.int64)
        if len(mine) < ALIGNED or len(theirs) < ALIGNED:
            return
        apart = np.abs(np.lib.stride_tricks.sliding_window_view(theirs, ALIGNED) - mine).mean(axis=1)
        best = int(np.argmin(apart))
        if apart[best] < CLOSE * np.diff(mine).mean():
            self.count = reference.count - len(theirs) + best + ALIGNED
            self.is_aligned = True


@dataclass(eq=False)
class Member:
    """A rank that is traced here; rank None: it followed from a split not all of whose ranks are traced."""

    communicator: Communicator
    tgid: int
    handle: int
    rank: int | None
    sequences: dict[int, Sequence] = field(default_factory=dict)
    collectives: int = 0
    captured: int = 0  # calls that went into a graph instead
    replayed: int = 0  # launches of such a graph
    splits: int = 0
    waits_since: tuple[int, Entry] | None = None  # the oldest collective that no wait of its process has covered
    latest: tuple[int, Entry] | None = None
    last_times: int = 0  # how often it came last
    late_ns: int = 0  # by how much, in sum
    waits: int = 0  # that had a collective to wait for
    waited_ns: int = 0  # from when it came to the last of those to when the wait returned, in sum
    has_gap: bool = False  # rows of its threads were lost: its entries had to be counted anew
    lateness: Lateness = field(default_factory=Lateness)

    def is_counted(self, call: int) -> bool:
        """Whether it is known which round of a function its next one is."""
        sequence = self.sequences.get(call)
        return sequence.is_aligned if sequence else not self.has_gap

    @property
    def is_lost(self) -> bool:
        """Whether none of its entries can be told any more."""
        return self.has_gap and not any(sequence.is_aligned for sequence in self.sequences.values())

    def entry(self, call: int, number: int) -> Entry | None:
        """When it came to that collective; None where it has not, or that is not known any more."""
        sequence = self.sequences.get(call)
        return sequence.at(number) if sequence else None


@dataclass(eq=False)
class Communicator:
    """identity: the hash of its id; size: None where it is not known."""

    identity: int
    size: int | None
    members: list[Member] = field(default_factory=list)
    rounds: int = 0  # that all traced ranks have come to
    open: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)  # (function, number): when the first came
    done: dict[int, int] = field(default_factory=dict)  # of each function, the rounds that all traced ranks have come to
    splits: dict[int, list[tuple[int, int, int, Member | None]]] = field(default_factory=dict)  # (colour, key, rank, part) of each

    @property
    def name(self) -> str:
        """What surfaces call it."""
        return f"{self.identity >> 32:08x}"

    @property
    def untraced(self) -> int | None:
        """How many of its ranks are not traced here, or cannot be counted; None where its size is not known."""
        return None if self.size is None else max(self.size - sum(not member.is_lost for member in self.members), 0)

    def view(self, now_ns: int) -> CommunicatorView:
        """It as it is at `now_ns`."""
        members = sorted(self.members, key=lambda m: (m.rank is None, m.rank or 0, m.tgid))
        ranks = (
            RankView(m.rank, m.tgid, m.collectives, m.captured, m.replayed, m.last_times, m.late_ns, m.waits, m.waited_ns) for m in members
        )
        return CommunicatorView(self.name, self.size, self.untraced, self.rounds, tuple(ranks), tuple(_open(self, now_ns)))


@dataclass(frozen=True)
class OpenCollective:
    """A collective that has not finished: since when (ns), and which traced ranks have not come to it (rank, pid)."""

    function: str
    number: int
    since_ns: int
    came: tuple[tuple[int | None, int], ...]
    missing: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class RankView:
    """A traced rank in a snapshot.

    last_times and late_ns: how often it came last of those traced here, and by how much later than the one before. waits and
    waited_ns: how often it waited for collectives, and for how long since it had come to the last of them: the rank of a communicator
    that waits least is the one that the others wait for, whatever their clocks say.
    """

    rank: int | None
    tgid: int
    collectives: int
    captured: int
    replayed: int
    last_times: int
    late_ns: int
    waits: int = 0
    waited_ns: int = 0


@dataclass(frozen=True)
class CommunicatorView:
    """A communicator in a snapshot. untraced: how many of its ranks are not traced here; None: not known."""

    name: str
    size: int | None
    untraced: int | None
    rounds: int
    ranks: tuple[RankView, ...]
    open: tuple[OpenCollective, ...]


def _open(known: Communicator, now_ns: int) -> Iterator[OpenCollective]:
    """The oldest collective that has not finished, if that is so for OPEN_NS: not all came, or who came still waits."""
    (call, number), since_ns = next(iter(known.open.items()), ((0, 0), now_ns))
    if now_ns - since_ns < OPEN_NS:
        waiting = [(m.waits_since, m) for m in known.members if m.waits_since and m.is_counted(m.waits_since[0])]
        if not waiting:
            return
        (call, entry), member = min(waiting, key=lambda one: one[0][1].come_ns)
        sequence = member.sequences[call]
        since_ns = entry.come_ns
        number = sequence.count - sum(other.come_ns >= since_ns for other in sequence.entries)
        if now_ns - since_ns < OPEN_NS:
            return
    came = [m for m in known.members if m.entry(call, number)]
    missing = [m for m in known.members if m.is_counted(call) and m not in came]
    if not missing and not any(m.waits_since for m in came):
        return
    yield OpenCollective("graph" if call == GRAPH_LAUNCH else table.BY_NUMBER[call].name, number + 1, since_ns, _who(came), _who(missing))


def _who(members: Iterable[Member]) -> tuple[tuple[int | None, int], ...]:
    return tuple((member.rank, member.tgid) for member in members)
