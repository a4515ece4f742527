"""Verdicts under real eBPF on the simulated driver, against what was injected: by cause and by how much it cost.

Each label runs with faults of several sizes (see gputail/sim/programs/victim.c). A request into which something was injected
counts in the dose that it really cost: what it took beyond the median of the clean ones, of which 3 to 10% is the small
dose, up to 22% the middle one, beyond that the large one; less has not hurt. `right`: the first cause is the injected one.
`silent`: no outlier, or of unknown cause. Twins look like another label and must never be named as it; decoys are
another process's kernels beside noise on the host; in compounds two causes hurt one request, and both are to be named; shifts last,
and are to be told as one change of regime. Two simpler ways (baselines.py) are scored on the same rows.

With --gpu the same on a real GPU: the PyTorch programs of tests/gpu, beside `gputail record`, whose recordings are judged.

With --tier the probes are at that tier, or at what the default budget pays for (auto), instead of seeing everything.

usage: scripts/bench accuracy [--json] [--gpu] [--tier T] [--seconds S] [--seeds N] [--labels L,...] [--record DIR | --judge DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from baselines import WAYS

from gputail import traces
from gputail.baseline import OUTLIER_SHARE
from gputail.events import Batch, end_ns
from gputail.pipeline import Pipeline
from gputail.probes.table import OFF_CPU_CALL
from gputail.sim.judge import HAS_CULPRIT, RIGHT, SLACK_NS
from gputail.sim.scenario import Truth, scenario, write_trace
from gputail.tiers import TIERS

DEFAULT_BUDGET = 0.01
DOSES = {"small": 0.03, "middle": 0.10, "large": 0.22}
CAUSES = (
    "gpu+xgemm", "graph+xgemm", "copy+xcopy", "gside", "gdevsync", "devsync", "pageable", "morework", "gmorework", "gil", "cpuhog",
    "compute", "sleep", "module", "alloc", "backpressure", "mixed",
)  # fmt: skip
SEVERAL = {"mixed"}  # labels whose requests are each slow for a reason of their own
# label -> the causes that it must not be given
TWINS = {
    "none+xgemm": {"foreign_kernel"},
    "gpu+elsewhere": {"foreign_kernel"},
    "between": {"sibling_kernel", "blocking_sync"},
    "longkernel": {"blocking_sync", "sibling_kernel", "foreign_kernel", "memcpy"},
}
COMPOUNDS = {
    "sleep+xgemm": ({"host_blocked"}, {"foreign_kernel"}),
    "alloc+xgemm": ({"memory_alloc"}, {"foreign_kernel"}),
    "gil+xgemm": ({"host_blocked", "cpu_preempted"}, {"foreign_kernel"}),
}
SHIFTS = ("shift8", "shift12", "shift30", "ramp")
DECOYS = {"noise+xgemm": {"host_compute", "host_blocked", "memory_alloc"}}
# On a real GPU faults are put into victims that wait for it: one whose CPU is the bottleneck hides them in what the CPU does.
ON_GPU = (
    "gpu+xgemm", "graph+xgemm", "gpu+xcopy", "gside", "gdevsync", "gmorework", "gsleep", "gcompute", "ggil", "galloc", "gptxjit",
    "gpageable", "ghog", "threads+xgemm", "two+xgemm", "sleep+xgemm", "shift12", "none+xgemm", "gpu", "graph", "devsync", "async+xgemm",
    "none",
)  # fmt: skip
LABELS = (*CAUSES, *TWINS, *DECOYS, *COMPOUNDS, *SHIFTS, "none", "gpu", "async")
# A clean request is compared with this many around it, since CPUs change their speed for seconds.
AROUND = 21
# Of a compound, both causes count as named when each has this share of the excess at least.
MATERIAL = 0.03


@dataclass
class Tally:
    """Counts of requests of one label. by_dose: dose -> first cause -> how many; silence is ""."""

    label: str
    runs: int = 0
    requests: int = 0
    one_to_one: int = 0
    clean: int = 0
    blamed: Counter[str] = field(default_factory=Counter)  # clean ones by the cause they were given
    unhurt: Counter[str] = field(default_factory=Counter)  # injected into, but not slower, likewise
    by_dose: dict[str, Counter[str]] = field(default_factory=lambda: {dose: Counter() for dose in DOSES})
    wrong: Counter[str] = field(default_factory=Counter)  # of those with another cause than the injected one, by it
    rights: Counter[str] = field(default_factory=Counter)  # by dose, how many had a right cause first
    named: int = 0  # right ones with the right process
    explained: list[float] = field(default_factory=list)  # share of the excess of right ones that is not unknown
    confidence: list[tuple[float, bool]] = field(default_factory=list)  # stated, and whether the cause was right
    latency_ms: list[float] = field(default_factory=list)  # from the request's end to its record
    both: list[int] = field(default_factory=lambda: [0, 0, 0])  # of a compound: hurt by two things, both named, one of them first
    regimes: int = 0
    after_shift: int = 0  # outliers in the second half
    # way of baselines.py -> right, and of how many: the middle and large dose
    others: dict[str, list[int]] = field(default_factory=lambda: {way: [0, 0] for way in WAYS})


def tally(into: Tally, records: Iterable[dict[str, Any]], truth: Truth, calls: np.ndarray) -> None:
    """Add one run of a label; calls: its CALL rows."""
    into.runs += 1
    mine = sorted((record for record in records if record["tid"] == truth.victim), key=lambda record: record["start_ns"])
    starts = np.array([record["start_ns"] for record in mine], np.int64)
    ends = np.array([record["end_ns"] for record in mine], np.int64)
    begin, end = truth.requests[:, 0], truth.requests[:, 1]
    took = driver_spans(calls, truth)
    injected = np.zeros(len(begin), bool)
    for first, last in np.concatenate([truth.faults, truth.bursts]):
        injected |= (begin < last) & (end > first)
    cost = took / usual_around(took, injected) - 1
    if truth.label in SHIFTS:
        into.after_shift += sum(record["outlier"] for record in mine if record["start_ns"] > begin[len(begin) // 2])
    if truth.label in COMPOUNDS:
        _tally_compound(into, mine, truth)
        return
    rights = right_causes(truth)
    slow = np.flatnonzero(injected & (cost >= DOSES["middle"]) & np.array([bool(right) for right in rights], bool))
    for way, name in WAYS.items():
        into.others[way][0] += sum(cause in rights[number] for number, cause in zip(slow, name(calls, truth, slow), strict=True))
        into.others[way][1] += len(slow)
    into.requests += len(begin)
    for number in range(len(begin)):
        inside = mine[np.searchsorted(ends, begin[number]) : np.searchsorted(starts, end[number])]
        whole = len(inside) == 1 and inside[0]["start_ns"] >= begin[number] - SLACK_NS and inside[0]["end_ns"] <= end[number] + SLACK_NS
        into.one_to_one += whole
        worst = max((record for record in inside if record["outlier"]), key=lambda record: record["excess_ns"], default=None)
        cause = worst["cause"] if worst and worst["cause"] != "unknown" else ""
        if not injected[number]:
            into.clean += 1
            # What the thread itself was slower for by then (its CPU, most of all) is host_compute, and no false blame.
            into.blamed[cause] += bool(cause) and not (cause == "host_compute" and cost[number] >= OUTLIER_SHARE - 0.01)
            continue
        if cost[number] < DOSES["small"]:
            into.unhurt[cause] += bool(cause)
            continue
        dose, right = _dose(cost[number]), rights[number]
        into.by_dose[dose][cause] += 1
        into.rights[dose] += cause in right
        if cause and cause not in right:
            into.wrong[cause] += 1
        if worst and cause:
            into.confidence.append((worst["confidence"], cause in right))
        if worst and cause in right:
            into.named += any(c["cause"] in right and c["culprit_pid"] == truth.aggressor for c in worst["contributions"])
            unknown = sum(c["ns"] for c in worst["contributions"] if c["cause"] == "unknown")
            into.explained.append(1 - unknown / max(worst["excess_ns"], 1))


def right_causes(truth: Truth) -> list[frozenset[str]]:
    """For each request the causes that name rightly what was injected into it; none where that is no cause."""
    kind = truth.label.rpartition("+")[2]
    rights = [RIGHT.get(kind, frozenset())] * len(truth.requests)
    for (first, last), fault in zip(truth.faults, truth.kinds, strict=False):
        for number in np.flatnonzero((truth.requests[:, 0] < last) & (truth.requests[:, 1] > first)):
            rights[number] = RIGHT[fault]
    return rights


def driver_spans(calls: np.ndarray, truth: Truth) -> np.ndarray:
    """From each request's first driver call to its last return (ns): what came before is not the GPU's."""
    mine = calls[(calls["tid"] == truth.victim) & (calls["call"] < OFF_CPU_CALL)]
    start, end = mine["start_ns"].astype(np.int64), end_ns(mine).astype(np.int64)
    spans = np.zeros(len(truth.requests), np.int64)
    for number, (begin, until) in enumerate(truth.requests):
        first, stop = np.searchsorted(end, begin), np.searchsorted(end, until, side="right")
        if stop > first:
            spans[number] = end[stop - 1] - max(start[first], begin)
    return spans


def usual_around(durations: np.ndarray, injected: np.ndarray) -> np.ndarray:
    """What each request would have taken: the median of the AROUND clean ones nearest to it."""
    clean = np.flatnonzero(~injected)
    place = np.clip(np.searchsorted(clean, np.arange(len(durations))) - AROUND // 2, 0, max(len(clean) - AROUND, 0))
    columns = np.minimum(place[:, None] + np.arange(min(AROUND, len(clean))), len(clean) - 1)
    return np.median(durations[clean[columns]], axis=1)


def _tally_compound(into: Tally, mine: list[dict[str, Any]], truth: Truth) -> None:
    """Requests with a fault and a burst in them that took a fifth longer, at least, than clean ones."""
    begin, end = truth.requests.T
    hits = [np.zeros(len(begin), bool) for _ in range(2)]
    for hit, spans in zip(hits, (truth.faults, truth.bursts), strict=True):
        for first, last in spans:
            hit |= (begin < last) & (end > first)
    usual = usual_around(end - begin, hits[0] | hits[1])
    into.requests += len(begin)
    into.clean += int((~hits[0] & ~hits[1]).sum())
    pairs = COMPOUNDS[truth.label]
    for number in np.flatnonzero(hits[0] & hits[1] & (end - begin > 1.2 * usual)):
        records = [r for r in mine if r["outlier"] and r["start_ns"] < end[number] and r["end_ns"] > begin[number]]
        worst = max(records, key=lambda record: record["excess_ns"], default=None)
        shares = {c["cause"]: c["ns"] / worst["excess_ns"] for c in worst["contributions"]} if worst else {}
        into.both[0] += 1
        into.both[1] += all(any(shares.get(cause, 0) >= MATERIAL for cause in right) for right in pairs)
        into.both[2] += bool(worst) and worst["cause"] in pairs[0] | pairs[1]


def _dose(cost: float) -> str:
    return next(dose for dose in reversed(DOSES) if cost >= DOSES[dose])


def run(label: str, seconds: float, seed: int, into: Tally, keep: Path | None, tier: str) -> None:
    """One live run of a label: the victim has the last CPU, we and all others the rest."""
    from gputail.probes.tracer import TraceOptions, Tracer
    from gputail.sim.build import build

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    libraries = (str(build().libraries / "libcuda.so.1"),)
    probes = {"budget": DEFAULT_BUDGET} if tier == "auto" else {"tier": TIERS.index(tier)}
    tracer = Tracer(TraceOptions(pids=frozenset([os.getpid()]), libraries=libraries, **probes))
    pipeline, records, rows = Pipeline(), [], []
    try:
        with scenario(label, seconds, seed, cpus, varied=True) as running:
            over_at = None
            while over_at is None or time.monotonic() < over_at:  # verdicts come 0.4 s after a request's end
                batch = tracer.poll()
                pipeline.feed(batch)
                rows.append(batch.calls)
                for record in pipeline.take_records():
                    into.latency_ms.append((time.monotonic_ns() - record.end_ns) / 1e6)
                    records.append(record.as_dict())
                    if record.outlier:
                        tracer.arm(record.pid)
                if over_at is None and not running.is_running():
                    over_at = time.monotonic() + 0.6
            truth = running.truth()
    finally:
        tracer.close()
        os.sched_setaffinity(0, cpus)
    snapshot = pipeline.snapshot()
    if snapshot.lost:
        print(f"{label}: lost {snapshot.lost}", file=sys.stderr)
    into.regimes += sum(f"/{truth.victim}/" in change.workload for change in snapshot.regime_changes)
    if keep:
        write_trace(keep / f"{label}-{seed}.npz", np.concatenate(rows), truth)
    tally(into, records, truth, np.concatenate(rows))


def run_on_gpu(labels: list[str], seconds: float, folder: Path, tier: str) -> None:
    """Record every label's programs on the real GPU."""
    import gpu

    gpu.watch(labels, seconds, folder, keep_events=True, varied=True, options=("--tier", tier))


def judge_recording(folder: Path, label: str, into: Tally) -> None:
    """The tally of a recording that --gpu made."""
    import gpu

    from gputail.capture import CaptureReader

    with CaptureReader(str(folder / f"{label}.gpt")) as reader:
        batches = list(reader)
    tally_batches(into, batches, gpu.truth_of(folder, label))


def tally_batches(into: Tally, batches: list[Batch], truth: Truth) -> None:
    pipeline, records = Pipeline(), []
    for batch in batches:
        pipeline.feed(batch)
        records += [record.as_dict() for record in pipeline.take_records()]
    pipeline.finish()
    records += [record.as_dict() for record in pipeline.take_records()]
    into.regimes += sum(f"/{truth.victim}/" in change.workload for change in pipeline.snapshot().regime_changes)
    tally(into, records, truth, np.concatenate([batch.calls for batch in batches]))


def judge_again(path: Path, into: Tally) -> None:
    """The tally of a run that --record kept."""
    with np.load(path, allow_pickle=False) as kept:
        truth = Truth(str(kept["label"]), int(kept["victim"]), int(kept["aggressor"]), kept["requests"], kept["faults"], kept["bursts"])
    tally_batches(into, list(traces.batches(traces.load(str(path)))), truth)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def show(tallies: list[Tally], on_gpu: bool) -> None:
    # On a real GPU a program that is bound by its CPU waits for its results all the same.
    twins = {} if on_gpu else TWINS
    print("injected: right, wrong and silent of all, by dose")
    print(f"{'label':14}{'one to one':>11}" + "".join(f"{dose:>22}" for dose in DOSES) + f"{'culprit':>9}{'blamed':>12}  wrong causes")
    total: dict[str, Counter[str]] = {dose: Counter() for dose in DOSES}
    for one in [one for one in tallies if one.label not in (*COMPOUNDS, *SHIFTS)]:
        kind = one.label.rpartition("+")[2]
        cells = []
        for dose, given in one.by_dose.items():
            count, right, silent = given.total(), one.rights[dose], given[""]
            if kind in RIGHT or kind in SEVERAL:
                total[dose] += Counter(right=right, silent=silent, all=count)
            cells.append(f"{right:4}{count - right - silent:4}{silent:4} of{count:4}" if count else "-")
        rights = one.rights.total()
        named = share(one.named, rights) if kind in HAS_CULPRIT else "-"
        blamed = f"{sum(one.blamed.values())} of {one.clean}"
        row = f"{one.label:14}{share(one.one_to_one, one.requests):>11}" + "".join(f"{cell:>22}" for cell in cells)
        print(row + f"{named:>9}{blamed:>12}  " + ", ".join(f"{n} {cause}" for cause, n in one.wrong.most_common(4)))
    for dose, count in total.items():
        print(f"{dose}: {share(count['right'], count['all'])} right, {share(count['silent'], count['all'])} silent, of {count['all']}")
    for way in WAYS:
        right, count = (sum(one.others[way][column] for one in tallies) for column in (0, 1))
        print(f"by {way} (a reconstruction): {share(right, count)} right of the {count} of the middle and large dose")
    for names, what in ((twins, "twins"), (DECOYS, "decoys")):
        hurt = [(one, cause) for one in tallies if one.label in names for cause in names[one.label]]
        bad = sum(given[cause] for one, cause in hurt for given in (one.blamed, one.unhurt))
        # Where the label is that of a cause, too, a request that was hurt is rightly given it.
        bad += sum(given[cause] for one, cause in hurt if one.label.rpartition("+")[2] not in RIGHT for given in one.by_dose.values())
        print(f"{what} blamed: {bad} of {sum(one.requests for one in tallies if one.label in names)} requests")
    for one in tallies:
        if one.label in COMPOUNDS:
            hurt, both, first = one.both
            print(f"compound {one.label}: {hurt} hurt by both; both named {share(both, hurt)}, one of them first {share(first, hurt)}")
        if one.label in SHIFTS:
            print(f"lasting {one.label}: {one.regimes} changes of regime in {one.runs} runs, {one.after_shift} outliers after it")
    tallies = [one for one in tallies if one.label not in SHIFTS]
    clean = sum(one.clean for one in tallies)
    blamed = sum((one.blamed for one in tallies), Counter[str]())
    print(
        f"clean requests given a cause, per 1,000 of {clean}: "
        + ", ".join(f"{1000 * n / clean:.1f} {c}" for c, n in blamed.most_common() if n)
    )
    if explained := [value for one in tallies for value in one.explained]:
        print(f"explained share of the excess, median: {np.median(explained):.2f}")
    if latency := [value for one in tallies for value in one.latency_ms]:
        print(f"from a request's end to its record, ms: median {np.median(latency):.0f}, 99% {np.percentile(latency, 99):.0f}")
    stated = np.array([pair for one in tallies if one.label in (*CAUSES, *ON_GPU) for pair in one.confidence], float).reshape(-1, 2)
    for low, high in ((0, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01)):
        inside = stated[(stated[:, 0] >= low) & (stated[:, 0] < high)]
        if len(inside):
            print(f"confidence {low:.1f} to {min(high, 1):.1f}: {share(int(inside[:, 1].sum()), len(inside))} right of {len(inside)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object per label")
    parser.add_argument("--gpu", action="store_true", help="on a real GPU; needs PyTorch")
    parser.add_argument("--tier", choices=(*TIERS[:3], "auto"), default="full")
    parser.add_argument("--seconds", type=float, default=9)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--labels")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the runs there as labelled traces")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge what --record kept, running nothing")
    options = parser.parse_args()
    known = ON_GPU if options.gpu else LABELS
    tallies = {label: Tally(label) for label in (options.labels.split(",") if options.labels else known)}
    if unknown := set(tallies) - set(known):
        parser.error(f"no such label: {', '.join(sorted(unknown))}")
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
    if options.gpu:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.judge or options.record or Path(temporary)).resolve()
            if not options.judge:
                run_on_gpu(list(tallies), options.seconds, folder, options.tier)
            for label, into in tallies.items():
                if (folder / f"{label}.gpt").exists():
                    judge_recording(folder, label, into)
    elif options.judge:
        for path in sorted(options.judge.glob("*.npz")):
            if path.stem.rpartition("-")[0] in tallies:
                judge_again(path, tallies[path.stem.rpartition("-")[0]])
    for label, into in tallies.items() if not (options.judge or options.gpu) else ():
        for seed in range(1, options.seeds + 1):
            print(f"\r{label:20} seed {seed}", end="\n" if not sys.stderr.isatty() else "\x1b[K", file=sys.stderr, flush=True)
            run(label, options.seconds, seed, into, options.record, options.tier)
    found = [one for one in tallies.values() if one.requests]
    if options.json:
        for one in found:
            print(json.dumps({"label": one.label, "requests": one.requests, "one_to_one": one.one_to_one, "clean": one.clean,
                              "blamed": one.blamed, "by_dose": one.by_dose, "right_process": one.named}))  # fmt: skip
    else:
        show(found, options.gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
