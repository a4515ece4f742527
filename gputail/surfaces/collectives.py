"""NCCL communicators in words and as plain dictionaries: what hangs, which rank is late how often, and lasting shifts.

In: the communicators and drifts of a snapshot. Out: what messages.py sends and lines that terminal.py prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gputail.surfaces.words import duration

if TYPE_CHECKING:
    from gputail.members import CommunicatorView, OpenCollective
    from gputail.snapshot import Snapshot

MAX_COMMUNICATORS = 32
MAX_RANKS = 64
MAX_DRIFTS = 16


def as_dicts(snap: Snapshot) -> dict[str, Any]:
    """`communicators` and `drifts` of a snapshot message; the latest, bounded."""
    return {
        "communicators": [_communicator(view, snap.time_ns) for view in snap.communicators[-MAX_COMMUNICATORS:]],
        "drifts": [asdict(drift) for drift in snap.drifts[-MAX_DRIFTS:]],
    }


def _communicator(view: CommunicatorView, time_ns: int) -> dict[str, Any]:
    return {
        "name": view.name,
        "size": view.size,
        "untraced": view.untraced,
        "rounds": view.rounds,
        "ranks": [
            {
                "rank": one.rank,
                "pid": one.tgid,
                "collectives": one.collectives,
                "captured": one.captured,
                "replayed": one.replayed,
                "last_times": one.last_times,
                "late_ns": one.late_ns,
                "waits": one.waits,
                "waited_ns": one.waited_ns,
            }
            for one in view.ranks[:MAX_RANKS]
        ],
        "open": [
            {
                "function": one.function,
                "number": one.number,
                "age_ns": time_ns - one.since_ns,
                "came": [{"rank": rank, "pid": pid} for rank, pid in one.came[:MAX_RANKS]],
                "missing": [{"rank": rank, "pid": pid} for rank, pid in one.missing[:MAX_RANKS]],
            }
            for one in view.open
        ],
    }


def hanging(view: CommunicatorView, one: OpenCollective, time_ns: int) -> str:
    """A collective that has not finished, in a sentence."""
    if one.missing:
        who = f"{_ranks(one.missing)} {'has' if len(one.missing) == 1 else 'have'} not come"
    elif view.untraced or view.size is None:
        who = f"all traced ranks came, {'others' if view.size is None else view.untraced} are not traced"
    else:
        who = "all ranks came"
    return f"{one.function} {one.number} of {view.name} is open for {duration(time_ns - one.since_ns)}: {who}"


def _ranks(who: Iterable[tuple[int | None, int]]) -> str:
    some = [f"rank {'?' if rank is None else rank} (pid {pid})" for rank, pid in who]
    return ", ".join(some[:2]) + (f" and {len(some) - 2} more" if len(some) > 2 else "")


def lines(snap: Snapshot) -> list[str]:
    """What is to be said of collectives; nothing where no communicator has several ranks."""
    out = []
    for view in snap.communicators[-MAX_COMMUNICATORS:]:
        out += [hanging(view, one, snap.time_ns) for one in view.open]
        if view.size == 1 or not view.ranks:
            continue
        known = "?" if view.size is None else view.size
        out.append(f"communicator {view.name}: {len(view.ranks)} of {known} ranks traced, {view.rounds} collectives of all these")
        late = sorted(view.ranks, key=lambda one: -one.late_ns)[:3] if view.rounds else []
        out += [
            f"  rank {'?' if one.rank is None else one.rank} (pid {one.tgid}) came last {one.last_times} times, "
            f"by {duration(one.late_ns / max(one.last_times, 1))} on average"
            for one in late
        ]
        captured, replayed = sum(one.captured for one in view.ranks), sum(one.replayed for one in view.ranks)
        if captured:
            seen = f"launched {replayed} times" if replayed else "whose launches are not seen: its collectives are invisible"
            out.append(f"  {captured} calls were captured into graphs, {seen}")
    for drift in snap.drifts[-MAX_DRIFTS:]:
        way = "later" if drift.after_ns > drift.before_ns else "earlier"
        out += [
            f"rank {'?' if drift.rank is None else drift.rank} (pid {drift.pid}) of communicator {drift.communicator} comes "
            f"{duration(abs(drift.after_ns - drift.before_ns))} {way} than it did, lastingly:",
            f"  from one collective to the next {duration(drift.cadence_after_ns)}, before {duration(drift.cadence_before_ns)}",
        ]
    return out
