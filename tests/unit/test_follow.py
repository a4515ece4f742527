"""`gputail events`: which verdicts are shown, how, and what happens when the daemon goes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputail.surfaces.control import ControlServer
from gputail.surfaces.follow import Filter
from tests.unit.snapshots import MS, S, outlier

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20


class Events:
    """`gputail events` as a process, what it prints in files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            command = [sys.executable, "-m", "gputail", "events", "--socket", str(folder / "socket"), *arguments]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.err
            time.sleep(0.01)

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Callable[..., Events]]:
    started: list[Events] = []

    def start(*arguments: str) -> Events:
        started.append(Events(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def serve(folder: Path) -> ControlServer:
    return ControlServer(str(folder / "socket"), {"pid": os.getpid()})


def test_the_last_verdicts_and_those_that_come_are_a_line_each(tmp_path: Path, events: Callable[..., Events]) -> None:
    server = serve(tmp_path)
    server.offer([outlier(pid) for pid in range(1, 21)])
    one = events("-n", "3")
    one.until(lambda: len(one.lines) == 3)
    server.offer([outlier(99)])
    one.until(lambda: len(one.lines) == 4)
    assert [re.findall(r"python3\[(\d+)\]", line) for line in one.lines] == [["18"], ["19"], ["20"], ["99"]]
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d\d\d python3\[18\] foreign_kernel: 12\.5 ms instead of 5\.20 ms: 7\.10 ms waiting behind kernels of pid 556 "
        r"\(sm90_xmma_gemm_f16\); 200 us in 1 smaller part",
        one.lines[0],
    )
    assert one.end() == 130
    assert one.err == ""
    server.close()


def test_filters_all_have_to_agree_and_json_is_the_record(tmp_path: Path, events: Callable[..., Events]) -> None:
    server = serve(tmp_path)
    server.offer([outlier(1), outlier(2), outlier(2, cause="memcpy"), outlier(2, excess_ns=1 * MS), outlier(2, workload="other")])
    one = events("-p", "2", "--cause", "foreign_kernel", "--min-ms", "5", "--workload", "HtoD", "--json")
    one.until(lambda: len(one.lines) == 1)
    assert json.loads(one.lines[0]) == json.loads(json.dumps(outlier(2).as_dict()))
    server.offer([outlier(1), outlier(2, end_ns=5 * S)])
    one.until(lambda: len(one.lines) == 2)
    assert json.loads(one.lines[1])["end_ns"] == 5 * S
    server.close()


def test_a_daemon_that_goes_is_waited_for(tmp_path: Path, events: Callable[..., Events]) -> None:
    server = serve(tmp_path)
    server.offer([outlier(1)])
    one = events()
    one.until(lambda: len(one.lines) == 1)
    server.close()
    one.until(lambda: "is gone; waiting for it" in one.err)
    server = serve(tmp_path)
    one.until(lambda: "following again" in one.err)
    server.offer([outlier(2)])
    one.until(lambda: len(one.lines) == 2)
    assert one.end() == 130
    server.close()


def test_without_a_daemon_one_line_says_what_to_do(tmp_path: Path, events: Callable[..., Events]) -> None:
    one = events()
    assert one.process.wait(DEADLINE_S) == 1
    assert one.err.splitlines() == [
        f"gputail: no gputail daemon serves {tmp_path / 'socket'}",
        "hint: start one with gputail run, or name its socket with --socket PATH",
    ]


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        (Filter(), True), (Filter(causes=("memcpy", "foreign_kernel")), True), (Filter(causes=("memcpy",)), False),
        (Filter(pids=(1000,)), True),
        (Filter(pids=(1,)), False), (Filter(workload="1000/Hto"), True), (Filter(workload="x"), False), (Filter(min_ms=7.3), True),
        (Filter(min_ms=7.4), False),
    ],
)  # fmt: skip
def test_a_filter_wants_what_it_says(wanted: Filter, shown: bool) -> None:
    assert wanted.wants(outlier().as_dict()) == shown
