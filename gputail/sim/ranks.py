"""Several ranks of one training job on simulated GPUs, one of them late at times, and what they logged of themselves.

In: a label. Out: a `JobTruth` when they have ended, and `judge` for request records against it. Tracing them is the caller's part.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gputail.errors import GputailError
from gputail.sim.build import build
from gputail.sim.judge import SLACK_NS, SLOW

# label -> the ranks' kind, what makes one of them late, and the kind of aggressor on that one's CPU
LABELS: dict[str, tuple[str, str, str]] = {
    "ranks": ("step", "none", ""),
    "latecopy": ("step", "copy", ""),
    "latepinned": ("step", "pinned", ""),
    "latework": ("step", "work", ""),
    "latelarger": ("step", "larger", ""),
    "latesleep": ("step", "sleep", ""),
    "latehog": ("step", "none", "cpuhog"),
    "lateshift": ("step", "shift", ""),
    # A twin: what makes a rank late is done while nobody waits for it.
    "idlecopy": ("slack", "copy", ""),
}
RANKS = 3
NICE = -10  # where we may: nobody but the aggressor is to be what keeps a rank off the CPU
LATE_SHARE = 0.5  # of an excess: a rank that is blamed for it must have come so much later than the one before


@dataclass(frozen=True)
class JobTruth:
    """What the ranks logged, by rank: pids, and (n, 2) arrays of start and end (CLOCK_MONOTONIC ns). late: the rank with the faults.

    beside: the faults are another program's, so that not all of them make the rank late.
    """

    label: str
    late: int
    pids: tuple[int, ...]
    requests: tuple[np.ndarray, ...]
    collectives: tuple[np.ndarray, ...]
    faults: np.ndarray
    beside: bool = False


@dataclass
class JobJudgement:
    """Counts of the other ranks' requests. slow: as logged, while a rank was injected to be late; right: named a collective_wait;
    named: with that rank as culprit. false: blamed on a rank that did not come last, or not by nearly as much, whenever it was."""

    label: str
    requests: int = 0
    one_to_one: int = 0
    injections: int = 0
    slow: int = 0
    flagged: int = 0
    right: int = 0
    named: int = 0
    false: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)  # what the late rank was said to do instead


class Job:
    """The running ranks of one label, started by `job`."""

    def __init__(self, label: str, seconds: float, seed: int, folder: Path, cpus: list[int], ranks: int) -> None:
        kind, fault, aggressor = LABELS[label]
        built = build()
        self.label, self.late, self._folder = label, seed % ranks, folder
        common = ["--seconds", str(seconds), "--seed", str(seed)]
        self._processes: list[subprocess.Popen] = []
        self._aggressor: subprocess.Popen | None = None
        for rank in range(ranks):
            (folder / f"nvidia{rank}").touch()
            is_late = rank == self.late
            arguments = [
                "--kind",
                kind,
                "--fault",
                fault if is_late else "none",
                "--rank",
                str(rank),
                "--ranks",
                str(ranks),
                "--id",
                str(folder),
            ]
            command = [built.programs["rank"], *arguments, *common, "--truth", folder / f"rank-{rank}"]
            self._processes.append(self._start(command, cpus[-1] if is_late else cpus[0], rank, NICE))
        if aggressor:
            command = [built.programs["aggressor"], "--kind", aggressor, *common, "--truth", folder / "aggressor"]
            self._aggressor = self._start(command, cpus[-1], 0, NICE)

    def _start(self, command: Sequence[object], cpu: int, device: int, nice: int) -> subprocess.Popen:
        environment = {**os.environ, "GPUTAIL_SIM_GPU": str(self._folder / "gpu"), "CUDA_VISIBLE_DEVICES": str(device)}
        prefix = ["nice", "-n", str(nice)] if os.geteuid() == 0 else []
        process = subprocess.Popen(
            [*prefix, "taskset", "-c", str(cpu), *map(str, command)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        if process.stdout.readline().strip() != "ready":
            raise GputailError(f"a simulated rank did not start (status {process.wait()})")
        return process

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def truth(self) -> JobTruth:
        """What they logged, once they have ended; waits for that."""
        logs = []
        for rank, process in enumerate(self._processes):
            if process.wait():
                raise GputailError(f"rank {rank} of {self.label!r} failed with status {process.returncode}")
            logs.append(_read_log(self._folder / f"rank-{rank}"))
        faults = logs[self.late]["fault"]
        if self._aggressor:
            if self._aggressor.wait():
                raise GputailError(f"the aggressor of {self.label!r} failed with status {self._aggressor.returncode}")
            faults = _read_log(self._folder / "aggressor")["burst"]
        return JobTruth(
            self.label,
            self.late,
            self.pids,
            tuple(log["request"] for log in logs),
            tuple(log["come"] for log in logs),
            faults,
            bool(self._aggressor),
        )

    def stop(self) -> None:
        for process in (*self._processes, self._aggressor):
            if process is not None:
                if process.poll() is None:
                    process.kill()
                process.wait()


@contextmanager
def job(label: str, seconds: float, seed: int = 1, cpus: list[int] | None = None, ranks: int = RANKS) -> Iterator[Job]:
    """Run the ranks of a label for about so many seconds; the late one alone on the last of the CPUs."""
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="gputail-sim-", dir=shared_memory) as folder:
        running = Job(label, seconds, seed, Path(folder), cpus or sorted(os.sched_getaffinity(0)), ranks)
        try:
            yield running
        finally:
            running.stop()


def _read_log(path: Path) -> dict[str, np.ndarray]:
    spans: dict[str, list[tuple[int, int]]] = {"request": [], "fault": [], "come": [], "burst": []}
    for line in path.read_text().splitlines():
        what, *numbers = line.split()
        if what in spans:
            spans[what].append((int(numbers[0]), int(numbers[1])))
    return {what: np.array(found, np.int64).reshape(-1, 2) for what, found in spans.items()}


def judge(records: Iterable[Mapping[str, Any]], truth: JobTruth) -> JobJudgement:
    """Compare the records of the ranks that waited with what all ranks logged."""
    records = list(records)
    result = JobJudgement(truth.label)
    come = np.stack([starts[:, 0] for starts in truth.collectives], axis=1)
    injected = _injected(truth, come)
    result.injections = int(injected.sum())
    for rank, pid in enumerate(truth.pids):
        if rank == truth.late:
            continue
        mine = sorted((r for r in records if r["pid"] == pid), key=lambda r: r["start_ns"])
        starts = np.array([r["start_ns"] for r in mine], np.int64)
        ends = np.array([r["end_ns"] for r in mine], np.int64)
        requests = truth.requests[rank]
        later_ns = (come[:, truth.late] - come[:, rank]).reshape(len(requests), -1).max(axis=1)
        took = requests[:, 1] - requests[:, 0]
        usual = np.median(took[~injected])
        for number, ((begin, end), duration) in enumerate(zip(requests.tolist(), took.tolist(), strict=True)):
            inside = mine[np.searchsorted(ends, begin) : np.searchsorted(starts, end)]
            result.requests += 1
            result.one_to_one += len(inside) == 1 and inside[0]["start_ns"] >= begin - SLACK_NS and inside[0]["end_ns"] <= end + SLACK_NS
            outliers = [r for r in inside if r["outlier"]]
            late_ns = _late_ns(come, begin, end)
            for contribution in (c for r in outliers for c in r["contributions"] if c["cause"] == "collective_wait"):
                blamed = contribution["culprit_pid"]
                if blamed is not None and not (injected[number] and blamed == truth.pids[truth.late]):
                    result.false += late_ns.get(truth.pids.index(blamed), 0) < LATE_SHARE * contribution["ns"]
            # Beside such a program a rank's own delay may be what counts.
            is_due = not truth.beside or later_ns[number] > LATE_SHARE * (duration - usual)
            if injected[number] and duration > SLOW * usual and is_due:
                _count(result, outliers, truth.pids[truth.late])
    return result


def _injected(truth: JobTruth, come: np.ndarray) -> np.ndarray:
    """Which steps the late rank was injected to be late in: all ranks make the same steps, with as many collectives each.

    Whoever shares the CPU with hogs is late in some of its steps then: in those in which it came last, and by a fair part of one.
    """
    theirs = truth.requests[truth.late]
    injected = np.zeros(len(theirs), bool)
    for begin, end in truth.faults:
        injected |= (theirs[:, 0] < end) & (theirs[:, 1] > begin)
    if truth.beside:
        first = come[:: len(come) // len(theirs)]
        others = np.delete(first, truth.late, axis=1).max(axis=1)
        injected &= first[:, truth.late] - others > (SLOW - 1) * np.median(theirs[:, 1] - theirs[:, 0])
    return injected


def _count(result: JobJudgement, outliers: list[Mapping[str, Any]], late_pid: int) -> None:
    result.slow += 1
    result.flagged += bool(outliers)
    worst = max(outliers, key=lambda r: r["excess_ns"], default=None)
    if worst is None or worst["cause"] != "collective_wait":
        cause = worst["cause"] if worst else "not flagged"
        result.wrong[cause] = result.wrong.get(cause, 0) + 1
        return
    result.right += 1
    first = worst["contributions"][0]
    result.named += first["culprit_pid"] == late_pid
    text = (first["culprit"] or "").rpartition(": ")[2]
    result.texts[text] = result.texts.get(text, 0) + 1


def _late_ns(come: np.ndarray, begin: int, end: int) -> dict[int, int]:
    """By rank that came last to any of the collectives of a request: by how much later (ns) than the first, at most."""
    out: dict[int, int] = {}
    for times in come[(come.min(axis=1) >= begin - 50_000_000) & (come.min(axis=1) < end) & (come.max(axis=1) >= begin)]:
        rank = int(times.argmax())
        out[rank] = max(out.get(rank, 0), int(times.max() - times.min()))
    return out
