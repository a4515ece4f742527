"""Which tier of probes each process gets, so that tracing costs it no more than the budget.

In: for each process what it called and the CPU time that it used, a tick after the other; what a probe costs here; which
processes have outliers. Out: a tier for each process. It looks at no clock and touches no probe: tiering.py does that.

A process is looked at in full first, whatever that costs, so that it is known what is usual. Then it gets the highest tier that
its budget pays for all the time. What that leaves over is saved, and spent on the full
tier for a while: at once where the process has outliers, else when there is enough for a longer look. A process that makes so
many launches that even one tick of them would cost more than may be saved keeps the light tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gputail.events import ENTRY_ONLY
from gputail.probes.table import BY_NUMBER, OFF_CPU_CALL, PER_KERNEL
from gputail.tiers import FULL, LAUNCH, LIGHT, sees_off_cpu, tier_of, without

TICK_S = 0.5
# How long the first look at what a process calls takes. What it costs does not count.
FIRST_LOOK_S = 4.0
# Savings, in seconds at full budget: spending them in one go makes at most twice the budget over ten seconds.
MOST_SAVED_S = 8.0
# How much must be saved before it is spent: for ticks of the full tier, without and with outliers to look at.
WORTH_TICKS, ARMED_TICKS = 4, 2
# What a probe costs is known to a tenth or so: the governor aims lower than the budget by that.
AIM = 0.9
# A tier fits if it would have cost less than this share of the budget; what is in use is given up above the whole of it.
FITS = 0.85
ARMED_FOR_S = 10.0
MAX_PROCESSES = 4096
# Weight of the latest tick in what is known of a process's rate of launches.
FRESH = 0.5
# While launches are not seen, their rate is taken to halve in this time, so that a process is looked at again some day; not that
# of one that does nothing but launch, since a look at it would cost more than may be saved by then.
HALF_LIFE_S = 300.0
NOTHING_ELSE = 0.5  # share that the full tier would cost

_IS_PER_KERNEL = np.zeros(65536, bool)
_IS_PER_KERNEL[[function.number for function in BY_NUMBER.values() if function.category in PER_KERNEL]] = True


@dataclass(frozen=True)
class Costs:
    """What probes take (ns): of a call's entry and return, of an entry alone, of both if they do nothing."""

    pair_ns: float
    entry_ns: float
    trap_ns: float

    @property
    def off_cpu_ns(self) -> float:
        """Of a stretch off the CPU. An estimate, as that cannot be measured beside a switch, which takes far longer and varies:
        there is no trap, and the work is that of a pair of probes about twice, since a record is put into a map and taken out.
        """
        return 2 * max(self.pair_ns - self.trap_ns, 0.0)


@dataclass
class Hits:
    """What probes recorded of a process. per_kernel: calls seen whole or at their entry only; other: all other calls."""

    other: int = 0
    per_kernel: int = 0
    entries: int = 0
    off_cpu: int = 0

    @property
    def total(self) -> int:
        return self.other + self.per_kernel + self.entries + self.off_cpu

    def cost_ns(self, costs: Costs) -> float:
        return (self.other + self.per_kernel) * costs.pair_ns + self.entries * costs.entry_ns + self.off_cpu * costs.off_cpu_ns


@dataclass
class Governed:
    """One process. Shares are of its CPU time."""

    state: int = FULL  # as tiers.state has it
    share: float | None = None  # what tracing cost it in the last tick; None: not known
    hits_per_s: float = 0.0
    shed_s: float = 0.0  # how long it has had less than the full tier
    per_kernel_rate: float | None = None  # calls for each ns of CPU time, while they were seen
    off_cpu_rate: float | None = None  # stretches, likewise
    saved_ns: float = 0.0
    armed_s: float = 0.0
    first_look_s: float = FIRST_LOOK_S  # how much of it is left
    cpu_ns: int | None = None
    cpu_rate: float = 0.0  # ns a second
    hits: Hits = field(default_factory=Hits)


class Governor:
    """Keeps each process's cost under a budget, a share of the CPU time that it uses; `budget` is what it aims at."""

    def __init__(self, costs: Costs, budget: float) -> None:
        self.costs = costs
        self.set_budget(budget)
        self.processes: dict[int, Governed] = {}
        self.ratio: float | None = None  # of all processes together, in the last tick

    def set_budget(self, budget: float) -> None:
        """From the next tick on."""
        self.budget = AIM * budget

    def count(self, calls: np.ndarray) -> None:
        """Take in a batch's rows, without changes of tiers."""
        if not len(calls):
            return
        number = calls["call"]
        tgids, of = np.unique(calls["tgid"], return_inverse=True)
        is_off_cpu, is_per_kernel = number == OFF_CPU_CALL, _IS_PER_KERNEL[number]
        is_entry = is_per_kernel & ((calls["flags"] & ENTRY_ONLY) != 0)
        columns = [
            np.bincount(of[mask], minlength=len(tgids)).tolist()
            for mask in (~is_off_cpu & ~is_per_kernel, is_per_kernel & ~is_entry, is_entry, is_off_cpu)
        ]
        for tgid, other, per_kernel, entries, off_cpu in zip(tgids.tolist(), *columns, strict=True):
            hits = self._process(tgid).hits
            hits.other += other
            hits.per_kernel += per_kernel
            hits.entries += entries
            hits.off_cpu += off_cpu

    def _process(self, tgid: int) -> Governed:
        process = self.processes.get(tgid)
        if process is None:
            if len(self.processes) >= MAX_PROCESSES:
                del self.processes[next(iter(self.processes))]
            process = self.processes[tgid] = Governed()
        return process

    def arm(self, tgid: int) -> None:
        """It has an outlier: look closer while that can be paid."""
        if tgid in self.processes:
            self.processes[tgid].armed_s = ARMED_FOR_S

    def forget(self, tgid: int) -> None:
        self.processes.pop(tgid, None)

    def begin_anew(self, cpu_ns: Mapping[int, int]) -> None:
        """What was called and used until now does not count."""
        for tgid, process in self.processes.items():
            process.cpu_ns, process.hits = cpu_ns.get(tgid), Hits()

    def tick(self, seconds: float, cpu_ns: Mapping[int, int]) -> dict[int, int]:
        """The states (see tiers.py) of processes that are to change.

        seconds: since the last tick; cpu_ns: CPU time used in all by each process that lives.
        """
        cost_ns = used_ns = 0.0
        wanted = {}
        for tgid, process in list(self.processes.items()):
            total = cpu_ns.get(tgid)
            if total is None:
                continue  # it has ended; the tracer says so when it knows
            if process.cpu_ns is not None:
                used = max(total - process.cpu_ns, 0)
                cost = process.hits.cost_ns(self.costs)
                cost_ns, used_ns = cost_ns + cost, used_ns + used
                self._account(process, seconds, used, cost)
                chosen = self._choose(process, seconds, used)
                if chosen != process.state:
                    wanted[tgid] = process.state = chosen
            process.cpu_ns = total
            process.hits = Hits()
        if used_ns > 0:
            self.ratio = cost_ns / used_ns
        return wanted

    def _account(self, process: Governed, seconds: float, used_ns: int, cost_ns: float) -> None:
        hits, tier = process.hits, tier_of(process.state)
        process.share = cost_ns / used_ns if used_ns else None
        process.hits_per_s = hits.total / seconds
        process.shed_s += seconds * (process.state != FULL)
        process.armed_s = max(process.armed_s - seconds, 0.0)
        process.cpu_rate += FRESH * (used_ns / seconds - process.cpu_rate)
        per_kernel = (hits.per_kernel + hits.entries) / used_ns if used_ns and tier != LIGHT else None
        process.per_kernel_rate = self._updated(process.per_kernel_rate, per_kernel, self.costs.pair_ns, seconds)
        off_cpu = hits.off_cpu / used_ns if used_ns and sees_off_cpu(process.state) else None
        process.off_cpu_rate = self._updated(process.off_cpu_rate, off_cpu, self.costs.off_cpu_ns, seconds)
        if process.first_look_s > 0:
            process.first_look_s -= seconds * bool(hits.total - hits.off_cpu)
            return
        most = self.budget * MOST_SAVED_S * process.cpu_rate
        process.saved_ns = min(max(process.saved_ns + self.budget * used_ns - cost_ns, -most), most)

    @staticmethod
    def _updated(known: float | None, seen: float | None, cost_ns: float, seconds: float) -> float | None:
        """What is known of a rate, after a tick in which it was seen or not."""
        if seen is not None:
            return seen if known is None else known + FRESH * (seen - known)
        if known is not None and known * cost_ns < NOTHING_ELSE:
            return float(known * 0.5 ** (seconds / HALF_LIFE_S))
        return known

    def _choose(self, process: Governed, seconds: float, used_ns: int) -> int:
        if process.first_look_s > 0 or not used_ns or process.per_kernel_rate is None or process.off_cpu_rate is None:
            return process.state
        costs, now = self.costs, process.state
        least = process.hits.other * costs.pair_ns / used_ns
        off_cpu = process.off_cpu_rate * costs.off_cpu_ns
        per_kernel = {FULL: process.per_kernel_rate * costs.pair_ns, LAUNCH: process.per_kernel_rate * costs.entry_ns, LIGHT: 0.0}
        # From the one that sees most to the one that costs least.
        shares = {
            without(tier) if is_without else tier: least + per_kernel[tier] + (0.0 if is_without else off_cpu)
            for tier, is_without in ((FULL, False), (LAUNCH, False), (LIGHT, False), (LAUNCH, True), (LIGHT, True))
        }
        order = list(shares)
        current = order.index(now)
        fits = [one for place, one in enumerate(order) if shares[one] < self.budget * (1.0 if place >= current else FITS)]
        steady = fits[0] if fits else order[-1]
        if steady == FULL:
            return FULL
        # A tick of the full tier beyond what the budget pays meanwhile.
        a_tick = (shares[FULL] - self.budget) * process.cpu_rate * seconds
        if now == FULL:
            return FULL if process.saved_ns >= a_tick else steady
        worth = ARMED_TICKS if process.armed_s else WORTH_TICKS
        if process.saved_ns >= min(worth * a_tick, max(a_tick, self.budget * MOST_SAVED_S * process.cpu_rate * FITS)):
            return FULL
        return steady
