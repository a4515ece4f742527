"""NCCL communicators: which ranks of them are traced here, and when each rank came to each of their collectives.

In: CALL rows. Out: *rounds* (the n-th collective of one function on every rank is the same round, as NCCL requires), what
does not finish, and lasting shifts of one rank's lateness (drift.py). Whom a slow request blames for it is left to
attribution/collective_wait.py.

A rank *comes* to a collective with the call that enqueues it, or, in a group, with the ncclGroupEnd that does. What is
captured into a graph is enqueued with every launch of that graph; where the graph's making was not seen, that is invisible.
Sends and receives are between two ranks and no rounds. All is bounded, since traced processes make it.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from gputail.bounded import put
from gputail.budget import BLOCKS, C_QUERY, CLASS_OF_CALL, WAIT_OF_CALL
from gputail.drift import Drift
from gputail.events import AFTER_GAP
from gputail.members import ALIGNED, GRAPH_LAUNCH, OPEN_NS, Communicator, CommunicatorView, Entry, Member, Round, Sequence
from gputail.probes import table

MAX_COMMUNICATORS = 256
MAX_MEMBERS = 128  # of one communicator, traced here
MAX_HANDLES = 4096
MAX_GRAPHS = 4096
MAX_THREADS = 4096  # with a group or a capture open
MAX_PENDING = 1024  # collectives in one group
MAX_INSIDE = 16  # communicators whose collectives are in one graph
MAX_SPLITS = 8  # that not every rank has made yet
MAX_OPEN = 512  # rounds that not every rank has come to yet
_64_BITS = (1 << 64) - 1
IN_PROGRESS = 7  # ncclInProgress: a communicator made in the background

_NUMBER = {function.name: function.number for function in table.FUNCTIONS}
_MAKES = frozenset(_NUMBER[name] for name in _NUMBER if name.startswith("ncclCommInit")) | {table.MEMBER_CALL}
_ENDS = frozenset((_NUMBER["ncclCommDestroy"], _NUMBER["ncclCommAbort"]))
_SPLIT = _NUMBER["ncclCommSplit"]
_GROUP_START, _GROUP_END = _NUMBER["ncclGroupStart"], _NUMBER["ncclGroupEnd"]
_CAPTURE_END = _NUMBER["cuStreamEndCapture"]
_CAPTURE_BEGINS = frozenset(number for name, number in _NUMBER.items() if name.startswith("cuStreamBeginCapture"))
_INSTANTIATES = frozenset(number for name, number in _NUMBER.items() if name.startswith("cuGraphInstantiate"))
_POINT_TO_POINT = frozenset((_NUMBER["ncclSend"], _NUMBER["ncclRecv"]))
COLLECTIVES = frozenset(f.number for f in table.FUNCTIONS if f.category == table.COLLECTIVE) - _POINT_TO_POINT
_MATTERS = np.zeros(65536, bool)
_MATTERS[
    list(_MAKES | _ENDS | _CAPTURE_BEGINS | _INSTANTIATES | COLLECTIVES | {_SPLIT, _GROUP_START, _GROUP_END, _CAPTURE_END, GRAPH_LAUNCH})
] = True
_INSTANTIATING = np.zeros(65536, bool)
_INSTANTIATING[list(_INSTANTIATES)] = True
_BRINGS_ONE = np.zeros(65536, bool)
_BRINGS_ONE[list(_MAKES)] = True


class Communicators:
    """All that were made while tracing; the oldest are forgotten beyond the bounds."""

    def __init__(self) -> None:
        self._by_identity: OrderedDict[int, Communicator] = OrderedDict()
        self._by_handle: OrderedDict[tuple[int, int], Member] = OrderedDict()
        self._of_process: dict[int, list[Member]] = {}
        self._groups: OrderedDict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = OrderedDict()
        self._captures: OrderedDict[tuple[int, int, int], list[int]] = OrderedDict()  # (tgid, tid, stream): handles
        self._graphs: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._executables: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self._ended: deque[tuple[int, int]] = deque()
        self.drifts: deque[Drift] = deque(maxlen=64)

    def learn(self, calls: np.ndarray) -> None:
        """Take in rows, in order of their end."""
        matters = _MATTERS[calls["call"]]
        if not self._of_process and not matters.any():
            return
        if not self._executables and not _INSTANTIATING[calls["call"]].any():
            matters &= calls["call"] != GRAPH_LAUNCH  # of graphs without collectives; some programs do nothing else
        has_one = [*self._of_process, *np.unique(calls["tgid"][_BRINGS_ONE[calls["call"]]]).tolist()]
        if has_one:
            matters |= np.isin(calls["tgid"], has_one) & (
                (WAIT_OF_CALL[calls["call"]] == BLOCKS)
                | ((CLASS_OF_CALL[calls["call"]] == C_QUERY) & (calls["result"] == 0))
                | ((calls["flags"] & AFTER_GAP) != 0)
            )
        chosen = calls[matters]
        columns = (
            chosen[name].tolist() for name in ("call", "tgid", "tid", "start_ns", "duration_ns", "handle", "stream", "size", "block")
        )
        flags = chosen["flags"].tolist()
        for gap, depth, result, row in zip(flags, chosen["depth"].tolist(), chosen["result"].tolist(), zip(*columns)):
            if gap & AFTER_GAP:
                self._lost_some(row[1], row[2])
            if result == 0 or result == IN_PROGRESS:
                self._take(depth, *row)

    def _take(
        self, depth: int, call: int, tgid: int, tid: int, start_ns: int, duration_ns: int, handle: int, stream: int, size: int, block: int
    ) -> None:
        end_ns = start_ns + duration_ns
        if call in COLLECTIVES:
            if not depth:  # another collective, or the launch of a captured one, made of it otherwise
                self._collective(call, tgid, tid, handle, stream, Entry(start_ns, end_ns, tid))
        elif call in _MAKES:
            self._make(tgid, handle, stream, size, block)
        elif call == _SPLIT:
            self._split(tgid, handle, stream, _signed(size), _signed(block))
        elif call in _ENDS:
            self._end(tgid, handle)
        elif call == _GROUP_START:
            if not depth:
                level, pending = self._groups.get((tgid, tid), (0, []))
                put(self._groups, (tgid, tid), (level + 1, pending), MAX_THREADS)
        elif call == _GROUP_END:
            if not depth:
                self._end_group(tgid, tid, Entry(start_ns, end_ns, tid))
        elif call in _CAPTURE_BEGINS:
            put(self._captures, (tgid, tid, stream), [], MAX_THREADS)
        elif call == _CAPTURE_END:
            self._end_capture(tgid, tid, stream, handle)
        elif call in _INSTANTIATES:
            self._executables.pop((tgid, handle), None)
            if handles := self._graphs.get((tgid, stream)):
                put(self._executables, (tgid, handle), handles, MAX_GRAPHS)
        elif call == GRAPH_LAUNCH:
            for inside in self._executables.get((tgid, handle), ()):
                if member := self._by_handle.get((tgid, inside)):
                    member.replayed += 1
                    self._come(member, GRAPH_LAUNCH, Entry(start_ns, end_ns, tid))
        else:
            self._waited(tgid, start_ns, end_ns)

    # Communicators.

    def _make(self, tgid: int, handle: int, identity: int, size: int, rank: int) -> None:
        if identity and 0 < size and rank < size:
            self._join(identity, size, tgid, handle, rank)

    def _join(self, identity: int, size: int | None, tgid: int, handle: int, rank: int | None) -> Member | None:
        self._end(tgid, handle)  # one whose end was not seen
        known = self._by_identity.get(identity)
        if known is None:
            known = Communicator(identity, size)
        if len(known.members) >= MAX_MEMBERS or known.size != size:
            return None
        if rank is not None and any(member.rank == rank for member in known.members):
            return None  # no rank is given out twice: one of the two lies
        self._by_identity[identity] = known
        while len(self._by_identity) > MAX_COMMUNICATORS or len(self._by_handle) >= MAX_HANDLES:
            oldest = next(one for one in self._by_identity.values() if one is not known)
            for member in list(oldest.members):
                self._end(member.tgid, member.handle)
        member = Member(known, tgid, handle, rank)
        known.members.append(member)
        self._by_handle[tgid, handle] = member
        self._of_process.setdefault(tgid, []).append(member)
        return member

    def _split(self, tgid: int, handle: int, parent: int, colour: int, key: int) -> None:
        """Ranks of one colour become a communicator, in the order of their keys: known when all have told theirs."""
        old = self._by_handle.get((tgid, parent))
        if old is None:
            return
        old.splits += 1
        whole = old.communicator
        new = None
        if colour >= 0 and handle:
            new = self._join(_hash(whole.identity, old.splits, colour), None, tgid, handle, None)
        told = whole.splits.setdefault(old.splits, [])
        told.append((colour, key, -1 if old.rank is None else old.rank, new))
        if len(told) == whole.size and all(rank >= 0 for _, _, rank, _ in told):
            for one in {colour for colour, _, _, _ in told if colour >= 0}:
                part = sorted(((key, rank, member) for of, key, rank, member in told if of == one), key=lambda entry: entry[:2])
                for place, (_, _, member) in enumerate(part):
                    if member is not None:
                        member.rank, member.communicator.size = place, len(part)
            del whole.splits[old.splits]
        while len(whole.splits) > MAX_SPLITS:
            del whole.splits[min(whole.splits)]

    def _end(self, tgid: int, handle: int) -> None:
        member = self._by_handle.pop((tgid, handle), None)
        if member is None:
            return
        of_process = self._of_process[tgid]
        of_process.remove(member)
        if not of_process:
            del self._of_process[tgid]
        known = member.communicator
        known.members.remove(member)
        if not known.members:
            self._by_identity.pop(known.identity, None)
        known.open.clear()

    def end_process(self, tgid: int, at_ns: int) -> None:
        """A process has ended; `forget` lets go of its ranks a while later, since verdicts still ask for them."""
        if tgid in self._of_process:
            self._ended.append((at_ns, tgid))

    def forget(self, watermark_ns: int) -> None:
        """Let go of ranks whose process has ended."""
        while self._ended and self._ended[0][0] < watermark_ns - OPEN_NS:
            _, tgid = self._ended.popleft()
            for member in list(self._of_process.get(tgid, ())):
                self._end(tgid, member.handle)

    def _lost_some(self, tgid: int, tid: int) -> None:
        self._groups.pop((tgid, tid), None)
        for member in self._of_process.get(tgid, ()):
            member.has_gap = True
            member.sequences.clear()
            member.waits_since = None
            member.communicator.open.clear()

    # Collectives.

    def _collective(self, call: int, tgid: int, tid: int, handle: int, stream: int, entry: Entry) -> None:
        member = self._by_handle.get((tgid, handle))
        if member is None:
            return
        for key, captured in self._captures.items():
            if key[0] == tgid and (key[1] == tid or key[2] == stream):
                if handle not in captured and len(captured) < MAX_INSIDE:
                    captured.append(handle)
                member.captured += 1
                return
        level, pending = self._groups.get((tgid, tid), (0, []))
        if not level:
            self._come(member, call, entry)
        elif len(pending) < MAX_PENDING:
            pending.append((call, handle))

    def _end_group(self, tgid: int, tid: int, entry: Entry) -> None:
        level, pending = self._groups.pop((tgid, tid), (0, []))
        if level > 1:
            self._groups[tgid, tid] = (level - 1, pending)
            return
        for call, handle in pending:
            if member := self._by_handle.get((tgid, handle)):
                self._come(member, call, entry)

    def _end_capture(self, tgid: int, tid: int, stream: int, graph: int) -> None:
        handles = self._captures.pop((tgid, tid, stream), None)
        if handles is None:  # a capture may be ended by another thread
            key = next((key for key in self._captures if key[0] == tgid and key[2] == stream), None)
            handles = self._captures.pop(key) if key else None
        self._graphs.pop((tgid, graph), None)
        if handles:
            put(self._graphs, (tgid, graph), handles, MAX_GRAPHS)

    def _come(self, member: Member, call: int, entry: Entry) -> None:
        member.collectives += 1
        member.latest = (call, entry)
        member.waits_since = member.waits_since or member.latest
        known = member.communicator
        sequence = member.sequences.setdefault(call, Sequence(not member.has_gap))
        sequence.add(entry)
        if not sequence.is_aligned:
            if sequence.count % ALIGNED == 0:
                self._align(known, call, sequence)
            return
        number = sequence.count - 1
        if number < known.done.get(call, 0):
            return  # the call by which this rank joined was seen to return after the others had gone on
        known.open.setdefault((call, number), entry.come_ns)
        if any(other.is_counted(call) and not other.entry(call, number) for other in known.members):
            if len(known.open) > MAX_OPEN:
                known.open.popitem(last=False)
            return
        del known.open[call, number]
        entries = {other: theirs for other in known.members if (theirs := other.entry(call, number))}
        if len(entries) > 1:
            known.done[call] = number + 1
            self._complete(known, entries)

    def _align(self, known: Communicator, call: int, sequence: Sequence) -> None:
        """Count on after a gap: by a rank that had none, or from here on where every one had."""
        others = (member.sequences.get(call) for member in known.members)
        reference = next((other for other in others if other and other.is_aligned), None)
        if reference is None:
            sequence.is_aligned = True
            known.done[call] = sequence.count
        else:
            sequence.align(reference)

    def _complete(self, known: Communicator, entries: dict[Member, Entry]) -> None:
        known.rounds += 1
        self._by_identity.move_to_end(known.identity)
        times = sorted(entry.come_ns for entry in entries.values())
        last = max(entries, key=lambda member: entries[member].come_ns)
        last.last_times += times[-1] > times[-2]
        last.late_ns += times[-1] - times[-2]
        middle = times[(len(times) - 1) // 2]
        for member, entry in entries.items():
            shift = member.lateness.add(entry.come_ns, entry.come_ns - middle)
            if shift is not None:
                self.drifts.append(Drift(known.name, member.rank, member.tgid, entry.come_ns, *shift))

    def _waited(self, tgid: int, start_ns: int, end_ns: int) -> None:
        """A wait of that time has returned: whatever was enqueued before it is taken to be done."""
        for member in self._of_process.get(tgid, ()):
            if member.waits_since is None or member.latest is None or member.waits_since[1].end_ns > start_ns:
                continue
            function, latest = member.latest
            member.waits_since = member.latest if latest.end_ns > start_ns else None
            last = next((entry for entry in reversed(member.sequences[function].entries) if entry.end_ns <= start_ns), None)
            if last is not None:
                member.waits += 1
                member.waited_ns += end_ns - last.come_ns

    # What the rest asks.

    def peers(self, tgid: int) -> frozenset[int]:
        """Other processes that share a communicator with this one, so are on other GPUs: NCCL refuses two ranks on one."""
        return frozenset(
            other.tgid for member in self._of_process.get(tgid, ()) for other in member.communicator.members if other.tgid != tgid
        )

    def rounds(self, tgid: int, tid: int, start_ns: int, end_ns: int, until_ns: int) -> list[Round]:
        """The collectives that a process came to from `start_ns` to before `end_ns`, in that order; entries that ended before `until_ns`.

        Where the thread itself came to any, those of the process's other threads are left out: they may be other ranks'.
        """
        found = []
        for member in self._of_process.get(tgid, ()):
            for call, sequence in member.sequences.items():
                for back, entry in enumerate(reversed(sequence.entries), 1):
                    if entry.come_ns < start_ns:
                        break
                    if entry.come_ns < end_ns and entry.end_ns < until_ns:
                        found.append((entry, call, sequence.count - back, member))
        if any(entry.tid == tid for entry, *_ in found):
            found = [one for one in found if one[0].tid == tid]
        found.sort(key=lambda one: one[0].come_ns)
        return [
            Round(member.communicator, call, number, member, entry, {
                other: theirs for other in member.communicator.members
                if other is not member and (theirs := other.entry(call, number)) and theirs.end_ns < until_ns
            })
            for entry, call, number, member in found
        ]  # fmt: skip

    def views(self, now_ns: int) -> tuple[CommunicatorView, ...]:
        """All of them as they are at `now_ns`."""
        return tuple(known.view(now_ns) for known in self._by_identity.values())


def _signed(value: int) -> int:
    """A C int that was read as 32 unsigned bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _hash(*words: int) -> int:
    value = 0
    for word in words:
        value = ((value ^ (word & _64_BITS)) * 0x9E3779B97F4A7C15) & _64_BITS
        value ^= value >> 29
    return value
