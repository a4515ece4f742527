"""`gputail demo`: real probes on simulated programs, and how many of their slow requests were named right.

Where this machine cannot be traced (no root, no eBPF) it says so and replays a recording of a real GPU instead.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from gputail import replay
from gputail.errors import GputailError
from gputail.pipeline import Pipeline
from gputail.sim.build import build
from gputail.sim.judge import Judgement, judge
from gputail.sim.scenario import scenario
from gputail.surfaces import terminal
from gputail.tail import RequestRecord

RECORDING = Path(__file__).resolve().parent / "data" / "h200-two-tenants.gpt"
# What is shown, the most telling first, and in words. Each needs its first two seconds to be clean.
SHOWN = {
    "gpu+xgemm": "a GPU-bound model, and another process's kernels in bursts",
    "devsync": "a model that now and then waits for the whole device while a side stream is busy",
    "cpuhog": "a model whose CPU is taken by busy loops",
    "pageable": "a model that now and then copies 192 MB of pageable memory",
}
MIN_SECONDS_EACH = 4.0


def run(seconds: float) -> int:
    """Trace for about so many seconds and print what was found; the exit status."""
    try:
        from gputail.probes.tracer import TraceOptions, Tracer

        built = build()
        # Only what this process starts: the node's other GPU programs are none of the demo's.
        tracer = Tracer(TraceOptions(pids=frozenset([os.getpid()]), libraries=(str(built.libraries / "libcuda.so.1"),)))
    except GputailError as error:
        return _replay(error)
    pipeline = Pipeline()
    judgements: list[Judgement] = []
    labels = list(SHOWN)[: max(1, min(len(SHOWN), int(seconds / MIN_SECONDS_EACH)))]
    # The simulated victim has the last CPU for itself, if there is more than one: the tracer must not be what preempts it.
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    try:
        for label in labels:
            records: list[RequestRecord] = []
            with _Programs(label, seconds / len(labels), cpus) as running:
                while running.is_running():
                    pipeline.feed(tracer.poll())
                    records += pipeline.take_records()
                    running.show_progress()
                settled = time.monotonic() + 0.5  # verdicts come 0.4 s after a request's end
                while time.monotonic() < settled:
                    pipeline.feed(tracer.poll())
                records += pipeline.take_records()
                judgements.append(judge([record.as_dict() for record in records], running.truth()))
        pipeline.feed(tracer.finish())
        pipeline.finish()
    finally:
        tracer.close()
        os.sched_setaffinity(0, cpus)
    sys.stdout.write(terminal.summary(pipeline.snapshot()))
    sys.stdout.write("\n" + _verdict(judgements))
    return 0


class _Programs:
    """A scenario and the progress line about it."""

    def __init__(self, label: str, seconds: float, cpus: list[int]) -> None:
        self.label, self.seconds = label, seconds
        self._scenario = scenario(label, seconds, cpus=cpus)
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> _Programs:
        self._running = self._scenario.__enter__()
        self._start = time.monotonic()
        if not self._is_terminal:
            print(f"gputail: {SHOWN[self.label]} ({self.seconds:.0f} s)", file=sys.stderr, flush=True)
        self.is_running, self.truth = self._running.is_running, self._running.truth
        return self

    def show_progress(self) -> None:
        if self._is_terminal:
            share = min(1.0, (time.monotonic() - self._start) / self.seconds)
            bar = "#" * round(20 * share)
            print(f"\r[{bar:20}] {SHOWN[self.label]}\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        self._scenario.__exit__(None, None, None)
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _verdict(judgements: list[Judgement]) -> str:
    head = ("injected", "requests", "cut right", "slow", "named right", "right process", "clean blamed")
    rows = []
    for one in judgements:
        named = "-" if one.named is None else f"{one.named} of {one.right}"
        cut = f"{100 * one.one_to_one / max(1, one.requests):.1f}%"
        rows.append((one.label, str(one.requests), cut, str(one.slow), f"{one.right} of {one.slow}", named, f"{one.blamed} of {one.clean}"))
    slow, right = sum(one.slow for one in judgements), sum(one.right for one in judgements)
    lines = ["what was injected, as the programs themselves logged it, against the verdicts", terminal.table(head, rows)]
    if wrong := {cause: sum(one.wrong.get(cause, 0) for one in judgements) for one in judgements for cause in one.wrong}:
        lines.append("not right: " + ", ".join(f"{count} {cause}" for cause, count in wrong.items()))
    lines.append(f"{right} of {slow} injected slow requests were named right")
    return "\n".join(lines) + "\n"


def _replay(error: GputailError) -> int:
    print(
        f"{error}\ngputail: this machine cannot be traced now; a recording of an H200 with two tenants follows", file=sys.stderr, flush=True
    )
    return replay.run(str(RECORDING), None)
