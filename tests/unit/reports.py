"""Recordings and pages for the tests of reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gputail import events
from gputail.capture import CaptureWriter
from gputail.report import Options, analyse
from gputail.surfaces.report.page import Page
from tests.unit.streams import MS, START_NS, US, Actor, S, batches, stream

DATA = Path(__file__).parent.parent / "data"
TRACES = ("xgemm", "gil", "devsync")
VICTIM, CULPRIT, KERNEL = 100, 200, 0xBEEF
HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e\n\\</title><!--"
HOSTILE_BYTES = b"ker\xff\xfe\x1b]0;x\x07<img src=x onerror=alert(1)>\"'"


def page_of(name: str, **options: object) -> Page:
    """The page of a trace of a real GPU."""
    return analyse(Options(str(DATA / f"{name}.npz"), **options))  # type: ignore[arg-type]


def serving_beside_a_burst(requests: int = 120, slow: tuple[int, ...] = (60, 61, 90)) -> tuple[Actor, Actor]:
    """A victim, some of whose requests wait 9 ms more, and another process whose kernels are outstanding just then."""
    victim, other = Actor(tgid=VICTIM), Actor(tgid=CULPRIT)
    for number in range(requests):
        if number in slow:
            other.now_ns = victim.now_ns
            other.call("cuLaunchKernel", 5 * US, handle=KERNEL, size=4096, block=256).sync(12 * MS)
            victim.serve(wait_ns=10 * MS)
        else:
            victim.serve()
    return victim, other


def kernel_name(text: bytes, tgid: int = CULPRIT, handle: int = KERNEL) -> np.ndarray:
    row = np.zeros(1, events.NAME)
    row["time_ns"], row["handle"], row["tgid"], row["kind"], row["length"] = START_NS, handle, tgid, events.NAME_KERNEL, len(text)
    row["text"] = text
    return row


def record(path: Path, actors: tuple[Actor, ...], name: str = "python3", kernel: bytes = b"gemm", lost: int = 0, cuts: int = 5) -> Path:
    """A recording of what the actors did, both processes of the same name."""
    calls = stream(*actors)
    edges = [len(calls) * cut // cuts for cut in range(1, cuts)]
    with CaptureWriter(str(path)) as writer:
        for number, batch in enumerate(batches(calls, edges)):
            news = tuple(events.Process(tgid, name, f"{name} serve.py") for tgid in (VICTIM, CULPRIT)) if number == 0 else ()
            names = kernel_name(kernel) if number == 0 else events.no_names()
            writer.write(events.Batch(batch.calls, names, news, {"ring_full": lost} if number == 2 and lost else {}, batch.watermark_ns))
        writer.write(events.Batch(watermark_ns=int(events.end_ns(calls)[-1]) + S))
    return path
