"""A simulated program and whatever disturbs it, run together, and what they logged of themselves.

In: a label, as the recorded traces have them. Out: a `Truth` when they have ended. Tracing them is the caller's part.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gputail.errors import GputailError
from gputail.probes.table import BY_NUMBER, COPY, GRAPH, LAUNCH
from gputail.sim.build import Built, build

# label -> the victim's kind, what it does to itself, and the kind of aggressor beside it
LABELS: dict[str, tuple[str, str, str]] = {
    "none": ("cpu", "none", ""),
    "gpu": ("gpu", "none", ""),
    "graph": ("graph", "none", ""),
    "async": ("async", "none", ""),
    "gpu+xgemm": ("gpu", "none", "xgemm"),
    "graph+xgemm": ("graph", "none", "xgemm"),
    "gpu+xcopy": ("gpu", "none", "xcopy"),
    "cpuhog": ("cpu", "none", "cpuhog"),
    "gside": ("gpu", "gside", ""),
    "gdevsync": ("gpu", "gdevsync", ""),
    "devsync": ("cpu", "devsync", ""),
    "pageable": ("cpu", "pageable", ""),
    "morework": ("cpu", "morework", ""),
    "gil": ("cpu", "gil", ""),
    "ptxjit": ("cpu", "ptxjit", ""),
    "alloc": ("cpu", "alloc", ""),
    "module": ("cpu", "module", ""),
    "gmorework": ("gpu", "morework", ""),
    "compute": ("cpu", "compute", ""),
    "mixed": ("cpu", "mixed", ""),  # slow for many reasons, each logged with its own
    "sleep": ("cpu", "sleep", ""),
    "backpressure": ("burst", "backpressure", ""),
    "copy+xcopy": ("copy", "none", "xcopy"),
    # Twins: they look like another label and must not be blamed for it.
    "none+xgemm": ("cpu", "none", "xgemm"),
    "between": ("gpu", "between", ""),
    "longkernel": ("gpu", "longkernel", ""),
    "gpu+elsewhere": ("gpu", "none", "xgemm"),  # on another GPU
    # Compounds: two things at once, each to be named.
    "sleep+xgemm": ("gpu", "sleep", "xgemm"),
    "alloc+xgemm": ("gpu", "alloc", "xgemm"),
    "gil+xgemm": ("gpu", "gil", "xgemm"),
    # Lasting shifts: another regime, and no outliers.
    "shift8": ("gpu", "shift8", ""),
    "shift12": ("gpu", "shift12", ""),
    "shift30": ("gpu", "shift30", ""),
    "ramp": ("gpu", "ramp", ""),
    # Decoys: a little noise on the host while another process's kernels hold the GPU.
    "noise+xgemm": ("gpu", "noise", "xgemm"),
}
OTHER_DEVICE = {"gpu+elsewhere"}  # labels whose aggressor has a GPU to itself


@dataclass(frozen=True)
class Truth:
    """What the programs logged: (n, 2) arrays of start and end (CLOCK_MONOTONIC ns); aggressor is 0 where there is none.

    kinds: what each fault was, where the program has several of them.
    """

    label: str
    victim: int
    aggressor: int
    requests: np.ndarray
    faults: np.ndarray
    bursts: np.ndarray
    kinds: tuple[str, ...] = ()


class Scenario:
    """The running programs of one label, started by `scenario`."""

    def __init__(self, label: str, seconds: float, seed: int, folder: Path, built: Built, cpus: list[int], varied: bool) -> None:
        kind, fault, aggressor = LABELS[label]
        self.label = label
        self._folder = folder
        self._environment = {**os.environ, "GPUTAIL_SIM_GPU": str(folder / "gpu")}
        # Hogs must have the victim's CPU to share; others stay off it, as far as there is another.
        for device in (0, 1):
            (folder / f"nvidia{device}").touch()
        self._victim_cpu, self._other_cpu = cpus[-1], cpus[-1] if aggressor == "cpuhog" else cpus[0]
        common = ["--seconds", str(seconds), "--seed", str(seed), "--varied", str(int(varied))]
        self._aggressor = (
            self._start(
                built.programs["aggressor"],
                self._other_cpu,
                "--kind",
                aggressor,
                *common,
                "--truth",
                str(folder / "aggressor"),
                device=int(label in OTHER_DEVICE),
            )  # fmt: skip
            if aggressor
            else None
        )
        self._victim = self._start(
            built.programs["victim"], self._victim_cpu, "--kind", kind, "--fault", fault, *common, "--truth", str(folder / "victim")
        )

    def _start(self, program: Path, cpu: int, *arguments: str, device: int = 0) -> subprocess.Popen:
        environment = {**self._environment, "CUDA_VISIBLE_DEVICES": str(device)}
        process = subprocess.Popen(
            ["taskset", "-c", str(cpu), str(program), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        if process.stdout.readline().strip() != "ready":
            raise GputailError(f"the simulated program {program.name} did not start (status {process.wait()})")
        return process

    def is_running(self) -> bool:
        return any(process.poll() is None for process in (self._victim, self._aggressor) if process)

    def truth(self) -> Truth:
        """What they logged, once they have ended; waits for that."""
        for process in filter(None, (self._victim, self._aggressor)):
            if process.wait():
                raise GputailError(f"a simulated program of {self.label!r} failed with status {process.returncode}")
        pid, requests, faults, _, kinds = _read_log(self._folder / "victim")
        other, bursts = 0, _spans([])
        if self._aggressor:
            other, _, _, bursts, _ = _read_log(self._folder / "aggressor")
        return Truth(self.label, pid, other, requests, faults, bursts, kinds)

    def stop(self) -> None:
        for process in filter(None, (self._victim, self._aggressor)):
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def scenario(label: str, seconds: float, seed: int = 1, cpus: list[int] | None = None, varied: bool = False) -> Iterator[Scenario]:
    """Run the programs of a label for so many seconds, on a simulated GPU of their own: the victim on the last of the CPUs.

    varied: faults of several sizes, some of them small, instead of one that cannot be overlooked.
    """
    built = build()
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="gputail-sim-", dir=shared_memory) as folder:
        running = Scenario(label, seconds, seed, Path(folder), built, cpus or sorted(os.sched_getaffinity(0)), varied)
        try:
            yield running
        finally:
            running.stop()


def _read_log(path: Path) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    """pid, requests, faults and bursts of a program's log, and what each fault was if it says so."""
    pid, kinds = 0, []
    spans: dict[str, list[tuple[int, int]]] = {"request": [], "fault": [], "burst": []}
    for line in path.read_text().splitlines():
        what, *numbers = line.split()
        what, _, kind = what.partition(":")
        kinds += [kind] if kind else []
        if what == "pid":
            pid = int(numbers[0])
        else:
            spans[what].append((int(numbers[0]), int(numbers[1])))
    return pid, _spans(spans["request"]), _spans(spans["fault"]), _spans(spans["burst"]), tuple(kinds)


def _spans(spans: list[tuple[int, int]]) -> np.ndarray:
    return np.array(spans, np.int64).reshape(-1, 2)


_TRACE = np.dtype(
    [("ts", "<u8"), ("dur", "<u8"), ("func", "<u8"), ("stream", "<u8"), ("bytes", "<u8"), ("pid", "<u4"), ("tid", "<u4"), ("api", "<u4"),
     ("ret", "<i4"), ("grid", "<u4"), ("block", "<u4"), ("cpu", "<u8")]
)  # fmt: skip


def write_trace(path: str | Path, calls: np.ndarray, truth: Truth, lost: int = 0) -> None:
    """Write CALL rows and the truth beside them as an .npz in the format of the labelled traces."""
    calls = calls[np.argsort(calls["start_ns"], kind="stable")]
    rows = np.zeros(len(calls), _TRACE)
    for theirs, ours in (
        ("ts", "start_ns"), ("dur", "duration_ns"), ("func", "handle"), ("stream", "stream"), ("pid", "tgid"), ("tid", "tid"),
        ("api", "call"), ("ret", "result"), ("cpu", "cpu"),
    ):  # fmt: skip
        rows[theirs] = calls[ours]
    categories = {number: function.category for number, function in BY_NUMBER.items()}
    is_launch = np.isin(calls["call"], [number for number, category in categories.items() if category in (LAUNCH, GRAPH)])
    rows["grid"][is_launch] = np.minimum(calls["size"][is_launch], 0xFFFFFFFF)
    rows["block"][is_launch] = calls["block"][is_launch]
    rows["bytes"][~is_launch] = calls["size"][~is_launch]
    # Its functions are named by what is exported: copies and allocations under the name with which CUDA 3.2 began.
    apis = {_exported(number): int(number) for number in np.unique(calls["call"])}
    np.savez_compressed(
        path, events=rows, apis=json.dumps(apis), names=json.dumps([]), lost=lost, victim=truth.victim, aggressor=truth.aggressor,
        requests=truth.requests, faults=truth.faults, bursts=truth.bursts, label=truth.label,
    )  # fmt: skip


def _exported(number: int) -> str:
    function = BY_NUMBER[int(number)]
    if not function.symbols:
        return function.name.replace("_", "")
    with_version = f"{function.name}_v2"
    return with_version if with_version in function.symbols and function.category == COPY else function.symbols[0]
