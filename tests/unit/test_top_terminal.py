"""top in a real terminal (a pseudo one): how it begins, how it ends, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputail.surfaces.control import ControlServer
from tests.unit.snapshots import snapshot, view

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 10
IN, OUT = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen
PAINTED = b"serve.py"  # in a row


class Terminal:
    """A process on a terminal of its own, and what it has written there."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24, code: str | None = None, stderr: int | None = None,
                 **environment: str | None) -> None:  # fmt: skip
        kept = {name: value for name, value in {**os.environ, "TERM": "xterm", **environment}.items() if value is not None}
        self.written = b""
        self._fd, self._held = pty.openpty()  # the other end is held, since it must outlive the process
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._held)
        start = ["-c", code] if code else ["-m", "gputail"]
        self._process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            cwd=ROOT,
            env=kept,
            stdin=self._held,
            stdout=self._held,
            stderr=self._held if stderr is None else stderr,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.pid = self._process.pid

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def send(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def read(self, wait_s: float = 0.05) -> None:
        """Take in what it has written, if anything comes within so long."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return
        self.written += os.read(self._fd, 1 << 16)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.written[-2000:]
            assert not self.has_ended() or condition(), self.written[-2000:]
            self.read()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """Its exit status, once it has ended; what it wrote until then is taken in."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.has_ended():
            assert time.monotonic() < deadline, self.written[-2000:]
            self.read()
        while select.select([self._fd], [], [], 0)[0]:
            self.read(0)
        status = self._process.poll()
        assert status is not None
        return status

    def is_as_it_was(self) -> bool:
        """Modes as before, and whatever was switched on is switched off again."""
        switched: dict[bytes, bool] = {mode: way == b"h" for mode, way in re.findall(rb"\x1b\[\?(\d+)([hl])", self.written)}
        wrap, cursor = b"7", b"25"  # on by themselves
        return termios.tcgetattr(self._held) == self.before and all(is_on == (mode in (wrap, cursor)) for mode, is_on in switched.items())

    def close(self) -> None:
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
        os.close(self._held)
        os.close(self._fd)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(str(tmp_path / "socket"), {"pid": 7, "version": "0.0", "start_ns": 0})
    made.publish(snapshot(*[view(1000 + number, outliers=number % 5) for number in range(40)]))
    yield made
    made.close()


@pytest.fixture
def terminal(server: ControlServer) -> Iterator[Callable[..., Terminal]]:
    """Starts top on the server's socket in a terminal."""
    started: list[Terminal] = []

    def start(*arguments: str, **options: object) -> Terminal:
        started.append(Terminal("top", "--socket", server.path, *arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.close()


# Ways to end it, with the exit statuses that they may have: 130 and 128 + n where it had not begun.
ENDS: dict[str, tuple[Callable[[Terminal], None], set[int]]] = {
    "q": (lambda one: one.send(b"q"), {0}),
    "ctrl-C": (lambda one: one.send(b"\x03"), {0, 130, -signal.SIGINT}),
    "SIGINT": (lambda one: os.kill(one.pid, signal.SIGINT), {0, 130, -signal.SIGINT}),
    "SIGTERM": (lambda one: os.kill(one.pid, signal.SIGTERM), {0, 128 + signal.SIGTERM, -signal.SIGTERM}),
    "SIGHUP": (lambda one: os.kill(one.pid, signal.SIGHUP), {0, 128 + signal.SIGHUP, -signal.SIGHUP}),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("page", [b"", b"\r", b"\r\r", b"?", b"/x"])
def test_field_case_43_the_terminal_is_left_as_it_was_from_every_page(terminal: Callable[..., Terminal], end: str, page: bytes) -> None:
    if end == "q" and page == b"/x":
        page = b""  # there it is a letter
    one = terminal()
    one.until(lambda: PAINTED in one.written)
    assert IN in one.written
    if page:
        length = len(one.written)
        one.send(page)
        one.until(lambda: len(one.written) > length)
    act, statuses = ENDS[end]
    act(one)
    assert one.end() in statuses
    assert one.is_as_it_was()
    assert b"Traceback" not in one.written


@pytest.mark.parametrize("end", [end for end in ENDS if end != "q"])
@pytest.mark.parametrize("bytes_written", [0, 1, 20, 60, 200, 1000])
def test_field_case_43_the_terminal_is_left_as_it_was_at_every_moment_of_the_start(
    terminal: Callable[..., Terminal], end: str, bytes_written: int
) -> None:
    one = terminal()
    one.until(lambda: len(one.written) >= bytes_written)
    act, statuses = ENDS[end]
    act(one)
    assert one.end() in statuses
    assert one.is_as_it_was()
    assert b"Traceback" not in one.written


def test_field_case_43_the_terminal_is_left_as_it_was_by_an_error_of_ours(server: ControlServer) -> None:
    code = (
        "import sys; from gputail.surfaces.top import listing\n"
        "def fail(*args): raise ZeroDivisionError('made up')\n"
        "listing.cost_line = fail\n"
        "from gputail.cli import entry; entry()"
    )
    one = Terminal("top", "--socket", server.path, code=code)
    try:
        assert one.end() == 1
        assert one.is_as_it_was()
    finally:
        one.close()


def test_field_case_43_the_terminal_is_left_as_it_was_when_the_daemon_turns_out_to_be_none(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mail"))
        listener.listen()
        one = Terminal("top", "--socket", str(tmp_path / "mail"))
        try:
            listener.accept()[0].close()  # whether anybody is there
            connection, _ = listener.accept()
            connection.sendall(b"220 mail ready\n")
            assert one.end() == 1
            assert b"does not speak gputail's protocol" in one.written
            assert one.is_as_it_was()
        finally:
            one.close()


def test_field_case_38_a_terminal_of_one_cell_and_a_storm_of_resizes_are_survived(terminal: Callable[..., Terminal]) -> None:
    one = terminal(columns=1, lines=1)
    one.until(lambda: IN in one.written)
    for number in range(200):
        one.resize(1 + number * 37 % 200, 1 + number * 11 % 60)
        if number % 20 == 0:
            one.read(0.01)
    one.resize(80, 24)
    one.written = b""
    one.until(lambda: b"q" in one.written and PAINTED in one.written)
    one.send(b"q")
    assert one.end() == 0


@pytest.mark.parametrize("term", ["dumb", None])
def test_field_case_37_a_terminal_that_cannot_place_text_gets_one_plain_view(terminal: Callable[..., Terminal], term: str | None) -> None:
    one = terminal(TERM=term)
    assert one.end() == 0
    assert b"no live view on a terminal of type" in one.written
    assert PAINTED in one.written and b"\x1b" not in one.written
    assert one.is_as_it_was()


def test_field_case_37_an_unknown_terminal_is_taken_for_one_that_understands_the_usual(terminal: Callable[..., Terminal]) -> None:
    one = terminal(TERM="no-such-terminal")
    one.until(lambda: PAINTED in one.written)
    one.send(b"q")
    assert one.end() == 0
    assert one.is_as_it_was()


def test_field_case_39_the_c_locale_gets_ascii_alone(terminal: Callable[..., Terminal]) -> None:
    one = terminal(LC_ALL="C")
    one.until(lambda: PAINTED in one.written)
    length = len(one.written)
    one.send(b"\r")
    one.until(lambda: b"latest outliers" in one.written[length:])
    one.send(b"q")
    assert one.end() == 0
    assert one.written.isascii()


def test_sixteen_colours_are_enough(terminal: Callable[..., Terminal]) -> None:
    one = terminal(TERM="xterm", COLORTERM=None)
    one.until(lambda: PAINTED in one.written)
    one.send(b"q")
    one.end()
    colours = re.findall(rb"\x1b\[([\d;]*)m", one.written)
    assert any(b"31" in colour or b"33" in colour for colour in colours)
    assert not any(re.search(rb"(38|48);[25];", colour) for colour in colours)


def test_the_picture_is_on_the_terminal_wherever_messages_go(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    with (tmp_path / "messages").open("wb") as file:
        one = terminal(stderr=file.fileno())
        one.until(lambda: PAINTED in one.written)
        one.send(b"q")
        assert one.end() == 0
    assert one.is_as_it_was()
    assert (tmp_path / "messages").read_bytes() == b""


def test_it_ends_when_its_terminal_is_gone(server: ControlServer) -> None:
    one = Terminal("top", "--socket", server.path)
    one.until(lambda: PAINTED in one.written)
    os.close(one._held)
    os.close(one._fd)
    assert one._process.wait(DEADLINE_S) in (0, 128 + signal.SIGHUP)
