"""A fleet in a box: many nodes' metrics served to a real Prometheus with the rules of deploy/prometheus, and what that costs.

Each node serves what the collector makes of a real recording (gputail/data), once for each GPU, growing at the rate recorded, and
the waits of its ranks: jobs of 128 ranks over 16 nodes, one rank a GPU, that take 50 ms a step. Round after round half of the jobs
get a late rank (3 to 30 ms), the others none, and a tenth of the nodes a neighbour whose kernels slow their requests. Counted: jobs whose
late rank and node the rules named within two scrapes after they could first see it, or named another; jobs without one in which
somebody was named; nodes with a neighbour found by cause. No clock of a node is used anywhere.

Measured at the real Prometheus: series and bytes of a node's scrape, samples a second, the time that the rules and queries take,
bytes on disk of a sample, the fleet's p99 from mergeable buckets against that of the durations that went into them.

usage: scripts/bench fleet [--json] [--nodes N] [--gpus N] [--rounds N] [--interval SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from gputail.pipeline import Pipeline
from gputail.snapshot import Snapshot, WorkloadView
from gputail.source import Source
from gputail.surfaces.metrics import SnapshotCollector
from gputail.surfaces.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
RECORDING = ROOT / "gputail" / "data" / "h200-two-tenants.gpt"
NODES_OF_JOB = 16
STEP_S, WAIT_S = 0.05, 0.004
LATE_S = (0.003, 0.03)
SETTLE = 4  # scrapes between two rounds, after which the windows of the rules have forgotten
DAY_S = 86_400
ENOUGH = 200  # requests of a workload that is played
EXCESS, NEIGHBOUR = "gputail_excess_seconds_total", "foreign_kernel"
BACKGROUND = ("host_compute", "cpu_preempted", "memory_alloc", NEIGHBOUR)
# Of its time a workload loses so much to each of these all along, and to a neighbour.
BACKGROUND_SHARE, NEIGHBOUR_SHARE = 0.001, 0.1
QUERIES = {
    "fleet p99": "histogram_quantile(0.99, sum by (le) (rate(gputail_request_duration_seconds_bucket[1m])))",
    "late ranks": "gputail:collective_straggler:ratio",
    "worst nodes by cause": f"topk(10, sum by (instance, cause) (rate({EXCESS}[1m])))",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8, help="of a node")
    parser.add_argument("--rounds", type=int, default=3, help="how often late ranks and neighbours come and go")
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between two scrapes; the rules are made for 15")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("fleet: no prometheus (package prometheus)", file=sys.stderr)
        return 1
    fleet = Fleet(options.nodes, options.gpus, options.seed)
    with serving(fleet) as port, tempfile.TemporaryDirectory() as folder, prometheus(Path(folder), port, options) as server:
        found = play(fleet, server, options)
        found |= measure(fleet, server, options)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


@dataclass(frozen=True)
class Template:
    """What a node serves of one recorded workload: text with a place for each number, and how fast those grow."""

    text: str
    growth_per_s: tuple[float, ...]
    durations_s: np.ndarray  # of the requests in it, sorted
    requests_per_s: float


def templates(gpus: int) -> list[Template]:
    """One for each workload of the recording that has enough requests."""
    pipeline = Pipeline()
    for batch in Source(str(RECORDING)):
        pipeline.feed(batch)
    pipeline.finish()
    durations: dict[str, list[int]] = {}
    for record in pipeline.take_records():
        durations.setdefault(record.workload, []).append(record.duration_ns)
    snapshot = pipeline.snapshot()
    return [
        template(snapshot, view, np.sort(np.array(durations[view.name])) / 1e9, gpus)
        for view in snapshot.workloads
        if view.requests >= ENOUGH
    ]


def template(snapshot: Snapshot, view: WorkloadView, durations_s: np.ndarray, gpus: int) -> Template:
    seconds = (view.last_end_ns - view.first_start_ns) / 1e9
    causes = {cause: 1 for cause in BACKGROUND}
    views = tuple(
        replace(view, name=f"train/{4000 + gpu}/step", tgid=4000 + gpu, outliers=causes, excess_ns=dict.fromkeys(causes, 10**9))
        for gpu in range(gpus)
    )
    collector = SnapshotCollector()
    collector.publish(replace(snapshot, workloads=views, communicators=()))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    out, growth, kind = [], [], ""
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("#"):
            kind = line.rsplit(" ", 1)[1] if line.startswith("# TYPE") else kind
            out.append(line.replace("%", "%%"))
            continue
        series, value = line.rsplit(" ", 1)
        if EXCESS in series and f'"{NEIGHBOUR}"' in series:
            continue  # a node's own
        number = float(value)
        if kind in ("counter", "histogram"):
            slow = BACKGROUND_SHARE if EXCESS in series else number / seconds
            growth.append(slow)
            out.append(series.replace("%", "%%") + (" %.4f" if series.split("{")[0].endswith(("_sum", "_seconds_total")) else " %d"))
        else:
            out.append(line.replace("%", "%%"))
    return Template("\n".join(out) + "\n", tuple(growth), durations_s, len(durations_s) / seconds)


class Job:
    """The ranks of some nodes, which of them is late, and by how much (s)."""

    def __init__(self, number: int, ranks: int) -> None:
        self.communicator, self.ranks = f"{0xC0000000 + number:08x}", ranks
        self.late_rank: int | None = None
        self.late_s = 0.0


class Node:
    """One node's counters, from when it started: at a time of its own, so no two have the same."""

    def __init__(self, number: int, job: Job, first_rank: int, gpus: int, of: Template, now: float, chance: random.Random) -> None:
        self.name, self.job, self.template = f"node-{number}", job, of
        self.has_neighbour = False
        self._ranks = [(first_rank + gpu, 1 + chance.uniform(-0.1, 0.1)) for gpu in range(gpus)]
        self._chance = chance
        self._started, self._at = now - chance.uniform(100, 10_000), now
        self._waits, self._waited, self._excess = np.zeros(gpus), np.zeros(gpus), 0.0

    def advance(self, now: float) -> None:
        """Grow up to then, all being as it is."""
        took, self._at = now - self._at, now
        steps = took / (STEP_S + self.job.late_s)
        for gpu, (rank, slowness) in enumerate(self._ranks):
            waits = WAIT_S * slowness * self._chance.gauss(1, 0.05) + (0 if rank == self.job.late_rank else self.job.late_s)
            self._waits[gpu] += steps
            self._waited[gpu] += steps * waits
        self._excess += took * (NEIGHBOUR_SHARE if self.has_neighbour else BACKGROUND_SHARE)

    def text(self, now: float) -> str:
        self.advance(now)
        up = now - self._started
        lines = [self.template.text % tuple(growth * up for growth in self.template.growth_per_s)]
        lines.append("# TYPE gputail_collective_waits_total counter\n")
        for name, values in (("gputail_collective_waits_total", self._waits), ("gputail_collective_wait_seconds_total", self._waited)):
            lines += [
                f'{name}{{communicator="{self.job.communicator}",rank="{rank}"}} {value:.6f}\n'
                for (rank, _), value in zip(self._ranks, values, strict=True)
            ]
        lines.append(f'{EXCESS}{{workload="train/4000/step",cause="{NEIGHBOUR}"}} {self._excess:.6f}\n')
        return "".join(lines)


class Fleet:
    """All nodes and jobs."""

    def __init__(self, nodes: int, gpus: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.templates = templates(gpus)
        now = time.monotonic()
        self.jobs = [Job(number, NODES_OF_JOB * gpus) for number in range(math.ceil(nodes / NODES_OF_JOB))]
        self.nodes = []
        for number in range(nodes):
            job, of = self.jobs[number // NODES_OF_JOB], self.templates[number % len(self.templates)]
            self.nodes.append(Node(number, job, number % NODES_OF_JOB * gpus, gpus, of, now, self.chance))
        self.gpus, self.lock = gpus, threading.Lock()

    def text(self, number: int) -> str:
        with self.lock:
            return self.nodes[number].text(time.monotonic())

    def nodes_of(self, job: Job) -> list[Node]:
        return [node for node in self.nodes if node.job is job]

    def inject(self) -> None:
        """Half of the jobs get a late rank, a tenth of the nodes a neighbour."""
        with self.lock:
            for node in self.nodes:
                node.advance(time.monotonic())
                node.has_neighbour = self.chance.random() < 0.1
            for job in self.jobs:
                if self.chance.random() < 0.5:
                    job.late_rank = self.chance.randrange(len(self.nodes_of(job)) * self.gpus)
                    job.late_s = math.exp(self.chance.uniform(*map(math.log, LATE_S)))

    def calm(self) -> None:
        with self.lock:
            for node in self.nodes:
                node.advance(time.monotonic())
                node.has_neighbour = False
            for job in self.jobs:
                job.late_rank, job.late_s = None, 0.0


@contextmanager
def serving(fleet: Fleet) -> Iterator[int]:
    """Serve /node/N for each node on one port of the loopback interface."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := (await reader.readuntil(b"\r\n\r\n")):
                body = fleet.text(int(request.split(b" ", 2)[1].rsplit(b"/", 1)[1])).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Server:
    """A running Prometheus: instant queries and its own metrics."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.address, self.process, self.folder = address, process, folder

    def get(self, path: str, post: bool = False) -> bytes:
        request = urllib.request.Request(f"http://{self.address}{path}", method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()  # type: ignore[no-any-return]

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = json.loads(self.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        return answer["data"]["result"]  # type: ignore[no-any-return]

    def own(self, name: str) -> dict[str, float]:
        """Values of one of its own metrics, by labels."""
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", self.get("/metrics").decode(), re.MULTILINE)
        return {labels: float(value) for labels, value in found}


@contextmanager
def prometheus(folder: Path, port: int, options: argparse.Namespace) -> Iterator[Server]:
    """The real one, scraping every node, with the rules as they are shipped."""
    config = {
        "global": {"scrape_interval": f"{options.interval}s", "evaluation_interval": f"{options.interval}s"},
        "rule_files": [str(path) for path in RULES.glob("*.rules.yml")],
        "scrape_configs": [
            {
                "job_name": "gputail",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": f"/node/{number}", "instance": f"node-{number}"}}
                    for number in range(options.nodes)
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config).replace('.0s"', 's"'))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}",
         "--web.enable-admin-api", "--log.level=error"]
    )  # fmt: skip
    server = Server(address, process, folder)
    try:
        wait_for(lambda: b"Ready" in server.get("/-/ready"), "Prometheus to be ready", process)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def wait_for(holds: Callable[[], bool], what: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"fleet: waited in vain for {what}")
        time.sleep(0.1)


class Round:
    """Who was late from its beginning on, and who was named how soon."""

    def __init__(self, fleet: Fleet) -> None:
        fleet.inject()
        self._began = time.monotonic()
        # Of each communicator, who is to be named; None: nobody.
        self.truth = {
            job.communicator: None if job.late_rank is None else (job.late_rank, fleet.nodes_of(job)[job.late_rank // fleet.gpus].name)
            for job in fleet.jobs
        }
        self.delays: dict[str, float] = {}
        self.wrong: set[str] = set()

    def take(self, named: dict[str, tuple[int, str]]) -> None:
        for communicator, who in named.items():
            if who == self.truth[communicator]:
                self.delays.setdefault(communicator, time.monotonic() - self._began)
            else:
                self.wrong.add(communicator)


def play(fleet: Fleet, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of late ranks and neighbours; what the rules said of them."""
    counts: Counter[str] = Counter()
    delays: list[float] = []
    interval = options.interval
    with Progress("playing a fleet") as progress:
        watch(server, SETTLE * interval, lambda named: None, interval)  # until there is a past
        for number in range(options.rounds):
            progress((number + 0.5) / (options.rounds + 0.5))
            of = Round(fleet)
            watch(server, SETTLE * interval, of.take, interval)
            late = {communicator for communicator, who in of.truth.items() if who is not None}
            delays += of.delays.values()
            counts["late ranks"] += len(late)
            counts["named within two scrapes"] += sum(delay <= 2 * interval for delay in of.delays.values())
            counts["named within three"] += sum(delay <= 3 * interval for delay in of.delays.values())
            counts["named at all"] += len(of.delays)
            counts["another named"] += len(of.wrong & late)
            counts["jobs without one"] += len(of.truth) - len(late)
            counts["of these somebody was named"] += len(of.wrong - late)
            hurt = {node.name for node in fleet.nodes if node.has_neighbour}
            found = server.query(
                f"topk by (instance) (1, sum by (instance, cause) (rate({EXCESS}[{3 * interval:.0f}s]))) > {NEIGHBOUR_SHARE / 2}"
            )
            named = {one["metric"]["instance"] for one in found if one["metric"]["cause"] == NEIGHBOUR}
            counts["nodes with a neighbour"] += len(hurt)
            counts["named with its cause"] += len(named & hurt)
            counts["falsely named"] += len(named - hurt)
            fleet.calm()
            watch(server, SETTLE * interval, lambda named: None, interval)
    seconds = {"seconds until named, median": float(np.median(delays or [math.nan])), "slowest": max(delays, default=math.nan)}
    return {**counts, **seconds}


def watch(server: Server, seconds: float, take: Callable[[dict[str, tuple[int, str]]], None], interval: float) -> None:
    """Look at who is named, ten times an interval, for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        named = server.query("gputail:collective_straggler:ratio")
        take({one["metric"]["communicator"]: (int(one["metric"]["rank"]), one["metric"]["instance"]) for one in named})
        time.sleep(interval / 10)


def measure(fleet: Fleet, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """What a node and the whole cost Prometheus, and how far its p99 of the fleet is from the true one."""
    scrape = fleet.text(0)
    series = sum(not line.startswith("#") for line in scrape.splitlines())
    rate = series / options.interval
    took = {}
    for name, expression in QUERIES.items():
        began = time.monotonic()
        answer = server.query(expression)
        took[f"query {name}, ms"] = (time.monotonic() - began) * 1e3
        if name == "fleet p99":
            p99 = float(answer[0]["value"][1])
    counts = [sum(node.template is one for node in fleet.nodes) for one in fleet.templates]
    true = weighted_quantile(fleet.templates, counts, 0.99)
    groups = server.own("prometheus_rule_group_last_duration_seconds")
    name = json.loads(server.get("/api/v1/admin/tsdb/snapshot", post=True))["data"]["name"]
    blocks = list((server.folder / "data" / "snapshots" / name).glob("*/meta.json"))
    samples = sum(json.loads(block.read_text())["stats"]["numSamples"] for block in blocks)
    size = sum(path.stat().st_size for block in blocks for path in (block.parent / "chunks").iterdir())
    index = sum((block.parent / "index").stat().st_size for block in blocks)
    resident = server.own("process_resident_memory_bytes")
    return {
        "nodes": options.nodes,
        "series of a node": series,
        "bytes of a scrape": len(scrape.encode()),
        "samples a second of a node": rate,
        "series in Prometheus": int(sum(server.own("prometheus_tsdb_head_series").values())),
        "Prometheus, resident MB": sum(resident.values()) / 1e6,
        "rules, ms": 1e3 * sum(groups.values()),
        **took,
        "bytes a sample on disk": size / samples,
        "bytes a series in a block's index": index / sum(json.loads(block.read_text())["stats"]["numSeries"] for block in blocks),
        "MB a node a day": (size / samples * rate * DAY_S + index / options.nodes) / 1e6,
        "fleet p99 by Prometheus, ms": p99 * 1e3,
        "true fleet p99, ms": true * 1e3,
        "p99 wrong by": p99 / true - 1,
    }


def weighted_quantile(of: list[Template], nodes: list[int], quantile: float) -> float:
    """Of all requests that so many nodes of each template make in the same time."""
    values = np.concatenate([one.durations_s for one in of])
    weights = np.concatenate(
        [np.full(len(one.durations_s), count * one.requests_per_s / len(one.durations_s)) for one, count in zip(of, nodes, strict=True)]
    )
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, quantile * reached[-1])])


if __name__ == "__main__":
    sys.exit(main())
