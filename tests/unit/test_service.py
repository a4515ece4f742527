"""What the service manager is told, byte by byte on a real socket; and the journal on a real stream."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputail import journal
from gputail.errors import GputailError
from gputail.service import ServiceManager

ROOT = Path(__file__).resolve().parents[2]
NOW = "1"  # WATCHDOG_USEC so short that it is always time


class Manager:
    """Our end of the socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path.replace("@", "\0", 1))
        self.environ = {"NOTIFY_SOCKET": path}

    def heard(self) -> list[str]:
        messages = []
        try:
            while True:
                messages.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@gputail-test-{os.getpid()}")
    yield made
    made.close()


def test_each_phase_is_told_in_the_words_of_the_protocol(manager: Manager) -> None:
    service = ServiceManager(manager.environ)
    service.status("compiling")
    service.ready("tracing\n2 libraries")
    service.reloading()
    service.stopping("x" * 1000)
    *heard, reloading, stopping = manager.heard()
    assert heard == ["STATUS=compiling", "READY=1\nSTATUS=tracing 2 libraries"]
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=") and reloading.rpartition("=")[2].isdigit()
    assert stopping == "STOPPING=1\nSTATUS=" + "x" * 500


def test_a_status_that_stays_the_same_is_told_once(manager: Manager) -> None:
    service = ServiceManager(manager.environ)
    for text in ("a", "a", "b", "a"):
        service.status(text)
    assert manager.heard() == ["STATUS=a", "STATUS=b", "STATUS=a"]


def test_the_watchdog_is_fed_only_when_work_has_got_further(manager: Manager) -> None:
    service = ServiceManager(manager.environ | {"WATCHDOG_USEC": NOW, "WATCHDOG_PID": str(os.getpid())})
    for until_ns in (5, 5, 4, 6, 6):
        service.progressed(until_ns)
    assert manager.heard() == ["WATCHDOG=1"] * 2


def test_the_watchdog_is_fed_no_more_often_than_asked_for(manager: Manager) -> None:
    service = ServiceManager(manager.environ | {"WATCHDOG_USEC": str(3_600_000_000)})
    for until_ns in range(100):
        service.progressed(until_ns)
    assert manager.heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": NOW, "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_without_a_watchdog_for_us_none_is_fed(manager: Manager, watchdog: dict[str, str]) -> None:
    ServiceManager(manager.environ | watchdog).progressed(1)
    assert manager.heard() == []


def test_what_we_start_cannot_speak_in_our_name() -> None:
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": NOW, "WATCHDOG_PID": "1", "HOME": "/"}
    ServiceManager(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("address", ["", "/nonexistent/socket", "vsock:2:1234", "relative"])
def test_a_manager_that_is_not_there_is_no_error(address: str) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": NOW})
    service.ready("tracing")
    service.progressed(1)


def test_a_manager_that_does_not_listen_is_not_waited_for(manager: Manager) -> None:
    service = ServiceManager(manager.environ | {"WATCHDOG_USEC": NOW})
    for number in range(10_000):
        service.status(str(number))
    lost = len(manager.heard())
    assert 0 < lost < 10_000
    service.progressed(1)
    assert manager.heard() == ["WATCHDOG=1"]


SPEAK = """
from gputail.errors import GputailError
from gputail.journal import WARNING, say, say_error
say("tracing")
say("two\\nlines", WARNING)
say_error(GputailError("cannot", "do that"))
"""


def spoken(journal_stream: str | None) -> str:
    """What a program says on a stderr that it is told is the journal's, where `{}` stands for what it is."""
    read, write = os.pipe()
    status = os.fstat(write)
    environ = {**os.environ, "JOURNAL_STREAM": journal_stream.format(f"{status.st_dev}:{status.st_ino}")} if journal_stream else None
    subprocess.run([sys.executable, "-c", SPEAK], cwd=ROOT, stderr=write, env=environ, check=True)
    os.close(write)
    with os.fdopen(read) as stream:
        return stream.read()


def test_the_journal_gets_a_priority_with_each_line() -> None:
    assert spoken("{}") == "<6>tracing\n<4>two\n<4>lines\n<3>cannot\n<3>hint: do that\n"


@pytest.mark.parametrize("stream", [None, "1:1", ""])
def test_any_other_stderr_gets_the_name_of_the_program(stream: str | None) -> None:
    assert spoken(stream) == "gputail: tracing\ngputail: two\nlines\ngputail: cannot\nhint: do that\n"


def test_a_closed_stderr_is_not_taken_for_the_journal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    journal.say_error(GputailError("cannot"))  # pytest's stderr is no file
    assert capsys.readouterr().err == "gputail: cannot\n"
