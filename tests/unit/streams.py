"""Streams of calls written by hand: threads that launch, copy, wait and rest on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from gputail import events
from gputail.pipeline import Pipeline
from gputail.probes import table
from gputail.requests import Request, Requests
from gputail.tail import RequestRecord

US, MS, S = 1_000, 1_000_000, 1_000_000_000
START_NS = 1000 * S
NUMBER = {function.name: function.number for function in table.FUNCTIONS}
NOT_READY = 600
NEVER = 1 << 62


class Actor:
    """One thread of a traced program; each method makes a call and moves the thread's clock to its return."""

    def __init__(self, tgid: int = 100, tid: int | None = None, at_ns: int = START_NS) -> None:
        self.tgid, self.tid, self.now_ns = tgid, tid or tgid, at_ns
        self.rows: list[tuple] = []

    def call(self, name: str, duration_ns: int, **fields: int) -> Actor:
        return self.row(NUMBER[name], self.now_ns, duration_ns, **fields)

    def row(self, number: int, start_ns: int, duration_ns: int, **fields: int) -> Actor:
        values = {"handle": 0, "stream": 0, "size": 0, "result": 0, "block": 0, "cpu": 0, "flags": 0, "depth": 0} | fields
        self.rows.append(
            (start_ns, duration_ns, values["handle"], values["stream"], values["size"], self.tgid, self.tid, values["result"],
             values["block"], number, values["cpu"], values["flags"], values["depth"], 0)
        )  # fmt: skip
        self.now_ns = max(self.now_ns, start_ns + duration_ns)
        return self

    def rest(self, ns: int) -> Actor:
        """Time passes outside of the driver."""
        self.now_ns += ns
        return self

    def sleep(self, ns: int, run_queue_ns: int = 0, **fields: int) -> Actor:
        """Off the CPU, asleep, the last of it waiting for the CPU."""
        woken = self.now_ns + ns - run_queue_ns
        return self.row(table.OFF_CPU_CALL, self.now_ns, ns, handle=1, size=woken, **fields)

    def preempted(self, ns: int, **fields: int) -> Actor:
        return self.row(table.OFF_CPU_CALL, self.now_ns, ns, handle=256, **fields)

    def launch(self, count: int = 1, stream: int = 0, grid: int = 64, block: int = 128, duration_ns: int = 5 * US) -> Actor:
        for _ in range(count):
            self.call("cuLaunchKernel", duration_ns, stream=stream, size=grid, block=block, handle=0xABC).rest(5 * US)
        return self

    def htod(self, size: int = 4096, duration_ns: int = 30 * US, stream: int = 0) -> Actor:
        return self.call("cuMemcpyHtoDAsync", duration_ns, size=size, stream=stream)

    def dtoh(self, size: int = 1024, duration_ns: int = 30 * US, stream: int = 0) -> Actor:
        return self.call("cuMemcpyDtoHAsync", duration_ns, size=size, stream=stream)

    def sync(self, duration_ns: int = 10 * US, stream: int = 0) -> Actor:
        return self.call("cuStreamSynchronize", duration_ns, stream=stream)

    def serve(self, wait_ns: int = 1 * MS, rest_ns: int = 2 * MS, launches: int = 20, grid: int = 64) -> Actor:
        """One request as an eager model makes it, and the rest after it; with the sync of a pageable copy inside."""
        self.htod().rest(3 * US).sync().rest(90 * US).launch(launches, grid=grid)
        return self.dtoh(duration_ns=wait_ns).rest(3 * US).sync().rest(rest_ns)


def stream(*actors: Actor) -> np.ndarray:
    """The rows of all actors in order of their end."""
    calls = np.array([row for actor in actors for row in actor.rows], events.CALL)
    return calls[np.lexsort((np.iinfo(np.int64).max - calls["start_ns"].astype(np.int64), events.end_ns(calls)))]


def batches(calls: np.ndarray, cuts: list[int] | None = None) -> Iterator[events.Batch]:
    """The rows cut at the given places, each batch with the watermark that its last row allows."""
    edges = [0, *(cuts or []), len(calls)]
    for first, stop in pairwise(edges):
        part = calls[first:stop]
        yield events.Batch(part, watermark_ns=int(events.end_ns(calls[:stop])[-1]) if stop else 0)


def random_cuts(calls: np.ndarray, seed: int) -> list[int]:
    chance = random.Random(seed)
    return sorted(chance.randrange(len(calls) + 1) for _ in range(chance.randrange(1, 60)))


def requests_of(*actors: Actor, cuts: list[int] | None = None) -> list[Request]:
    """All requests, in order of their end."""
    requests, out = Requests(), []
    for batch in batches(stream(*actors), cuts):
        out += requests.feed(batch.calls, batch.watermark_ns)
    return sorted(out + requests.finish(), key=lambda request: (request.end_ns, request.tid))


def replay(*actors: Actor, cuts: list[int] | None = None) -> list[RequestRecord]:
    pipeline = Pipeline()
    for batch in batches(stream(*actors), cuts):
        pipeline.feed(batch)
    pipeline.finish()
    return pipeline.take_records()
