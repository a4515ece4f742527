"""What live tests share: the bare library and its caller, gputail as a process, and waiting for a condition."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputail.sim.build import build_bare

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 30


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come; how long it takes is no matter short of the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Caller:
    """The bare caller: makes a number of calls each time it is told to, so many a second (0: as fast as it goes)."""

    def __init__(self, what: str, calls: int, rate: int, *, library: Path, program: Path) -> None:
        self.calls = calls
        self.process = subprocess.Popen(
            [program, what, str(calls), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
        )
        self.pid = self.process.pid

    def call(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        assert self.process.stdout.readline().strip().isdigit()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="session")
def bare() -> tuple[Path, Path]:
    """The bare libcuda and its caller."""
    return build_bare()


@pytest.fixture
def caller(bare: tuple[Path, Path]) -> Iterator[Callable[..., Caller]]:
    """Starts callers, and ends those that are left."""
    library, program = bare
    started: list[Caller] = []

    def start(what: str = "launch", calls: int = 23, rate: int = 0) -> Caller:
        started.append(Caller(what, calls, rate, library=library, program=program))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Gputail:
    """gputail as a process, its stderr in a file."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        stdout: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = folder / f"gputail-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "gputail", *arguments],
                cwd=ROOT,
                stderr=log,
                stdout=stdout or subprocess.DEVNULL,
                text=True,
                env={**os.environ, "GPUTAIL_CONFIG": os.devnull, **(environment or {})},  # not what this machine may be configured to
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        """Until it has said something on stderr."""
        wait_until(lambda: text in self.stderr or self.process.poll() is not None, f"{text!r} in {self.stderr!r}")
        assert text in self.stderr, self.stderr

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and its exit status."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def gputail(tmp_path: Path) -> Iterator[Callable[..., Gputail]]:
    """Starts gputail, and kills what is left of it."""
    started: list[Gputail] = []

    def start(*arguments: str, **options) -> Gputail:
        started.append(Gputail(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
