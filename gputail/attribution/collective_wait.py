"""A collective waited for a late rank.

Two things make a rank late. Its host came late to the call: then the time from this rank's call to the late one's, as far as
this rank spent it waiting (an NCCL call only enqueues, so mostly in the synchronization behind it), is the late rank's. Or
its host came in time and its GPU had more to do first: then it has enqueued more ahead of the collective than usual, which the
waiting rank has not. Who is late as always is in what is usual. Where no traced rank was late, nobody is blamed.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

import numpy as np

from gputail.attribution.case import GREW, MATERIAL, Case, contribution
from gputail.attribution.doing import WAITING, growth, profile, what_instead
from gputail.budget import (
    ALLOC,
    BLOCKS,
    C_COLLECTIVE,
    C_COPY,
    C_DTOH,
    C_GROUP,
    C_HTOD,
    C_QUERY,
    CLASS_OF_CALL,
    CLASSES,
    COLLECTIVE,
    COPY,
    HOST,
    LAUNCH,
    MODULE,
    OFF_CPU,
    RUN_QUEUE,
    SYNC,
    WAIT_OF_CALL,
)  # fmt: skip
from gputail.members import Entry, Member, Round
from gputail.tail import Contribution

CAUSE = "collective_wait"
LATEST = 9  # usual requests that tell what is usual of it
APART = 0.25  # of the later one's lateness, by which another rank must have been there before it
MOST = 0.5
MAX_MEMBERS = 16  # that are looked at for having had more to do
LATEST_DOING = 5  # and what the late rank usually does meanwhile
_OWN_PARTS = (RUN_QUEUE, OFF_CPU, ALLOC, MODULE, HOST, LAUNCH)

Span = tuple[int, int]
_IS_WAIT = np.isin(np.arange(len(CLASSES)), (C_HTOD, C_DTOH, C_COPY, C_COLLECTIVE, C_GROUP, C_QUERY))


def explain(case: Case) -> list[Contribution]:
    """The excess in waits for a late rank, each with that rank as culprit; what is left in NCCL calls has none."""
    rounds = case.rounds(case.request.start_ns, case.request.end_ns)
    out: list[Contribution] = []
    if _left(case) >= MATERIAL * case.excess_ns:
        out += _came_late(case, rounds)
    if _left(case) >= MATERIAL * case.excess_ns:
        out += _had_more_to_do(case, rounds)
    calls = case.own[case.own_class == C_COLLECTIVE]
    if rounds and all(of.communicator.size == 1 for of in rounds):
        return out  # there is nobody to wait for
    ns = case.take(COLLECTIVE)
    if not ns or not len(calls):
        return out + contribution(CAUSE, ns)
    longest = calls[np.argmax(calls["duration_ns"])]
    return out + contribution(CAUSE, ns, None, f"communicator {int(longest['handle']):#x}")


def _left(case: Case) -> int:
    return case.left[SYNC] + case.left[COPY] + case.left[COLLECTIVE]


def _take(case: Case, ns: int) -> int:
    taken = case.take(COLLECTIVE, ns)
    return taken + case.take_waiting(ns - taken)


def _came_late(case: Case, rounds: list[Round]) -> list[Contribution]:
    """By rank the time that was waited for it, beyond what is usually waited for any."""
    waited = _waited_for(rounds, _waits(case.own))
    total = sum(waited.values())
    if total < MATERIAL * case.excess_ns:
        return []
    latest = case.usual.latest[-LATEST:]
    usual_rounds = [case.rounds(start, end) for start, end in latest]
    before = [
        sum(_waited_for(found, _waits(case.thread(start, end))).values()) for found, (start, end) in zip(usual_rounds, latest, strict=True)
    ]
    beyond = total - int(median(before)) if before else total
    if any(of.communicator.untraced != 0 for of in rounds) and beyond < MOST * _left(case):
        return []  # it waited on after the last of those that are traced: somebody else was later still
    out: list[Contribution] = []
    for member, ns in waited.most_common():
        of = max((one for one in rounds if one.last is member), key=lambda one: one.late_ns)
        ns = min(ns, beyond)
        beyond -= ns
        taken = _take(case, ns)
        taken += case.take(RUN_QUEUE, ns - taken)  # kept off the CPU while it would have waited all the same
        taken += _hidden(case, rounds, usual_rounds, rounds.index(of), member, ns)
        out += _blame(case, rounds, of, member, of.late_ns, taken)
    return out


def _hidden(case: Case, rounds: list[Round], usual: list[list[Round]], number: int, member: Member, waited_ns: int) -> int:
    """Half of the time that this rank was late itself without making a difference, since the other one was later still.

    Either alone would have cost that time, so each gets half; none where they were late by nearly the same.
    """
    offsets = [
        max(entry.come_ns for entry in (found[number].entry, *found[number].others.values())) - start
        for found, (start, _) in zip(usual, case.usual.latest[-LATEST:], strict=True)
        if len(found) == len(rounds)
    ]
    if not offsets:
        return 0
    late_ns = rounds[number].others[member].come_ns - case.request.start_ns - int(median(offsets))
    if waited_ns < APART * late_ns:
        return 0
    return _take_half(case, min(late_ns - waited_ns, sum(case.left[part] for part in _OWN_PARTS)))


def _take_half(case: Case, hidden_ns: int) -> int:
    half, taken = hidden_ns // 2, 0
    for part in sorted(_OWN_PARTS, key=lambda part: -case.left[part]):
        taken += case.take(part, half - taken)
    return taken


def _had_more_to_do(case: Case, rounds: list[Round]) -> list[Contribution]:
    """All that is left of the waits, where one rank alone had enqueued more than usual ahead of a collective."""
    if max(case.grew("launches"), case.grew("block_threads"), case.grew("htod_bytes"), case.grew("copy_bytes")) >= GREW:
        return []
    found: dict[Member, tuple[float, Round]] = {}
    for number in {0, len(rounds) - 1} if rounds else ():  # each is judged by all that was enqueued since the step before
        of = rounds[number]
        for member in list(of.others)[:MAX_MEMBERS]:
            if member in found or member.tgid == case.request.tgid:
                continue
            now, usually = _doing(case, rounds, number, member)
            grew = growth(now, usually) if now and usually else 0.0
            if grew >= GREW:
                found[member] = (grew, of)
    if not found:
        return []
    member, (_, of) = max(found.items(), key=lambda item: item[1][0])
    late_ns = _left(case)
    taken = _take(case, late_ns)
    taken += _take_half(case, sum(case.left[part] for part in _OWN_PARTS) if taken >= APART * case.excess_ns else 0)
    return _blame(case, rounds, of, member, late_ns, taken)


def _blame(case: Case, rounds: list[Round], of: Round, member: Member, late_ns: int, ns: int) -> list[Contribution]:
    now, usually = _doing(case, rounds, rounds.index(of), member)
    instead = what_instead(now, usually, late_ns) if now else None
    text = f"{_who(member)}, {late_ns / 1e6:.1f} ms late"
    if instead == WAITING and (beyond := _waited_itself(case, rounds, of, member, late_ns)):
        return contribution(CAUSE, ns, beyond[0].tgid, f"{beyond[1]}; {_who(member)} waited for it")
    return contribution(CAUSE, ns, member.tgid, f"{text}: {instead}" if instead else text)


def _who(member: Member) -> str:
    return f"rank {'?' if member.rank is None else member.rank} of communicator {member.communicator.name} (pid {member.tgid})"


def _waited_itself(case: Case, rounds: list[Round], of: Round, member: Member, late_ns: int) -> tuple[Member, str] | None:
    """Whom the late rank waited for in another communicator, for most of what it was late, and what is to be said of that one."""
    span = _span(rounds, rounds.index(of), member)
    if span is None:
        return None
    since, until = span
    rows = case.process(member.tgid, since.end_ns, until.end_ns + 1)
    theirs = [
        one
        for one in case.communicators.rounds(member.tgid, until.tid, since.come_ns, until.come_ns, until.end_ns + 1)
        if one.communicator is not of.communicator
    ]
    (other, waited_ns), *_ = *_waited_for(theirs, _waits(rows[rows["tid"] == until.tid])).most_common(1), (None, 0)
    if other is None or waited_ns < MOST * late_ns:
        return None
    last = max((one for one in theirs if one.last is other), key=lambda one: one.late_ns)
    numbers = range(last.number, max(last.number - 1 - LATEST_DOING, 0), -1)
    now, *usually = (_profile(case, other, other.entry(last.function, n - 1), other.entry(last.function, n)) for n in numbers)
    instead = what_instead(now, [one for one in usually if one], last.late_ns) if now else None
    return other, f"{_who(other)}, {last.late_ns / 1e6:.1f} ms late" + (f": {instead}" if instead else "")


def _doing(case: Case, rounds: list[Round], number: int, member: Member) -> tuple[dict[str, int] | None, list[dict[str, int]]]:
    """What a rank did from the collective before the first of these until it came to that one; and at the same place of usual requests."""
    now = _stretch(case, rounds, number, member)
    usually = []
    for start, end in case.usual.latest[-LATEST_DOING:]:
        before = case.rounds(start, end)
        if len(before) == len(rounds) and (one := _stretch(case, before, number, member)):
            usually.append(one)
    return now, usually


def _stretch(case: Case, rounds: list[Round], number: int, member: Member) -> dict[str, int] | None:
    span = _span(rounds, number, member)
    return _profile(case, member, *span) if span else None


def _span(rounds: list[Round], number: int, member: Member) -> tuple[Entry, Entry] | None:
    first, until = rounds[0], rounds[number].others.get(member)
    since = member.entry(first.function, first.number - 1) if first.communicator is member.communicator else None
    return (since, until) if since and until else None


def _profile(case: Case, member: Member, since: Entry | None, until: Entry | None) -> dict[str, int] | None:
    if until is None or since is None or since.come_ns >= until.come_ns:
        return None
    rows = case.process(member.tgid, since.end_ns, until.end_ns + 1)
    return profile(rows, until.tid, since.end_ns, until.come_ns)


def _waited_for(rounds: list[Round], waits: list[Span]) -> Counter[Member]:
    """By the rank that came last, how long (ns) this one waited for it; no time twice."""
    out: Counter[Member] = Counter()
    reached = 0
    for of in sorted(rounds, key=lambda one: one.entry.come_ns):
        member = of.last
        if member is None:
            continue
        begin, end = max(of.entry.come_ns, reached), of.others[member].come_ns
        ns = sum(max(min(end, stop) - max(begin, start), 0) for start, stop in waits)
        if ns:
            out[member] += ns
        reached = max(reached, end)
    return out


def _waits(own: np.ndarray) -> list[Span]:
    """When a thread was in a call that waits: a synchronization, a copy, an NCCL call, or a run of queries."""
    kind = CLASS_OF_CALL[own["call"]]
    chosen = (WAIT_OF_CALL[own["call"]] == BLOCKS) | _IS_WAIT[kind]
    spans: list[Span] = []
    previous = -1
    for index in np.flatnonzero(chosen & (own["depth"] == 0)).tolist():
        start = int(own["start_ns"][index])
        end = start + int(own["duration_ns"][index])
        if spans and previous == index - 1 and kind[index] == kind[previous] == C_QUERY:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        previous = index
    return spans
