"""`top` and `events` on a real daemon that traces simulated programs, looked at in a real terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputail.sim.build import build
from gputail.sim.scenario import scenario
from tests.live.conftest import DEADLINE_S, ROOT, Gputail, wait_until

SECONDS = 60.0  # they are ended before

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")


class Screen:
    """A terminal with a shell in which one command is run."""

    def __init__(self, folder: Path, columns: int = 100, lines: int = 24) -> None:
        self._server = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), "env PS1='$ ' LANG=C.UTF-8 sh")
        wait_until(lambda: "$" in self.text, "a prompt")

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run([*self._server, *arguments], check=True, capture_output=True, text=True).stdout

    @property
    def text(self) -> str:
        return self._tmux("capture-pane", "-p")

    def run(self, *arguments: str) -> None:
        command = shlex.join([sys.executable, "-m", "gputail", *arguments])
        self._tmux("send-keys", "-l", f"cd {ROOT}; stty -g >{self._server[2]}.before; {command}; echo ended with $?")
        self.press("Enter")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(pattern, text := self.text, re.MULTILINE):
            assert time.monotonic() < deadline, f"never came: {pattern!r} on\n{text}"
            time.sleep(0.05)
        return text

    def stty_is_unchanged(self) -> bool:
        before, after = Path(f"{self._server[2]}.before"), Path(f"{self._server[2]}.after")
        self._tmux("send-keys", "-l", f"stty -g >{after}; echo told")
        self.press("Enter")
        self.wait_for("^told")
        return before.read_text() == after.read_text()

    def close(self) -> None:
        subprocess.run([*self._server, "kill-server"], capture_output=True)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    made = Screen(tmp_path)
    yield made
    made.close()


@pytest.fixture
def daemon(gputail: Callable[..., Gputail], tmp_path: Path) -> Callable[[], Gputail]:
    """Starts a daemon that serves tmp_path/socket and sees the simulated driver."""

    def start() -> Gputail:
        library = str(build().libraries / "libcuda.so.1")
        running = gputail("run", "--library", library, "--listen", "off", "--socket", str(tmp_path / "socket"))
        running.wait_for("tracing")
        wait_until((tmp_path / "socket").exists, "the socket")
        return running

    return start


def test_from_the_list_to_a_workload_to_the_outlier_that_names_the_culprit(
    screen: Screen, daemon: Callable[[], Gputail], tmp_path: Path
) -> None:
    daemon()
    screen.run("top", "--socket", str(tmp_path / "socket"))
    screen.wait_for("no workload has made a request yet")
    with scenario("gpu+xgemm", SECONDS, seed=3) as programs:
        screen.wait_for(r"^ *\d+ victim HtoD.* (foreign_kernel|cpu_preempted) ")
        screen.press("w", "Enter")
        text = screen.wait_for(r"^ +[\d:.]+ foreign_kernel: .* waiting behind kernels of pid")
        assert re.search(r"^  foreign_kernel +█+ ", text, re.MULTILINE)
        screen.press("Space")  # so that the list stands still while one of it is chosen
        screen.wait_for("paused")
        text = screen.wait_for(" foreign_kernel: ")
        listed = text[text.index("latest outliers") :].splitlines()[1:]
        for _ in range(next(number for number, line in enumerate(listed) if " foreign_kernel: " in line)):
            screen.press("Down")
        screen.press("Enter")
        text = screen.wait_for(r"waiting behind kernels of pid \d+ \(aggressor")
        assert re.search(r"^  this one +[hrzlcamwno]+ +\d", text, re.MULTILINE)
        screen.press("Escape")
        screen.wait_for("latest outliers")
        screen.resize(1, 1)
        screen.resize(80, 24)
        screen.press("Escape")
        screen.wait_for(r"^ *\d+ victim HtoD")
        screen.press("Space")
        screen.wait_for("^gputail top .* live ")
        screen.press("C-c")
        screen.wait_for("^ended with 0")
        assert screen.stty_is_unchanged()
        programs.stop()


def test_a_daemon_that_is_killed_and_started_again_is_found_again(screen: Screen, daemon: Callable[[], Gputail], tmp_path: Path) -> None:
    first = daemon()
    screen.run("top", "--socket", str(tmp_path / "socket"))
    screen.wait_for(rf"live .*daemon pid {first.process.pid},")
    first.end(signal.SIGKILL)
    screen.wait_for("reconnecting: the daemon is gone")
    second = daemon()
    screen.wait_for(rf"live .*daemon pid {second.process.pid},")
    screen.press("q")
    screen.wait_for("^ended with 0")


def test_a_second_daemon_on_the_same_socket_is_one_clear_line_naming_the_first(daemon, gputail, tmp_path: Path) -> None:
    first = daemon()
    second = gputail("run", "--listen", "off", "--socket", str(tmp_path / "socket"))
    assert second.process.wait(DEADLINE_S) == 1
    assert f"another gputail (pid {first.process.pid}) serves the control socket {tmp_path / 'socket'}" in second.stderr
    assert "Traceback" not in second.stderr
    assert first.end() == 0
    assert not (tmp_path / "socket").exists()


def sessions() -> set[int]:
    """Daemons that serve the private socket of a top."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--socket" in command and any(b"gputail-top-" in word for word in command):
                found.add(int(entry.name))
    return found


@pytest.mark.parametrize("end", ["q", "SIGKILL"])
def test_without_a_daemon_it_traces_by_itself_and_its_session_ends_with_it(screen: Screen, tmp_path: Path, end: str) -> None:
    others = sessions()
    screen.run("top", "--socket", str(tmp_path / "socket"))
    screen.wait_for(r"live \(tracing by itself, no daemon\)")
    (mine,) = sessions() - others
    if end == "q":
        screen.press("q")
        screen.wait_for("^ended with 0")
        assert screen.stty_is_unchanged()
    else:
        parent = int(Path(f"/proc/{mine}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    wait_until(lambda: mine not in sessions(), "the end of its session")


def test_events_are_the_verdicts_of_the_requests_that_were_made_slow(daemon: Callable[[], Gputail], tmp_path: Path) -> None:
    daemon()
    out = tmp_path / "events"
    command = [sys.executable, "-m", "gputail", "events", "--socket", str(tmp_path / "socket"), "--cause", "foreign_kernel", "--json"]
    with out.open("w") as file, scenario("gpu+xgemm", SECONDS, seed=3) as programs:
        following = subprocess.Popen(command, cwd=ROOT, stdout=file)
        try:
            wait_until(lambda: out.read_text().count("\n") >= 10, "10 verdicts")
        finally:
            following.send_signal(signal.SIGINT)
            assert following.wait(DEADLINE_S) == 130
        victim, aggressor = programs._victim.pid, programs._aggressor.pid if programs._aggressor else 0
        programs.stop()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["cause"] for record in records} == {"foreign_kernel"}
    assert {record["pid"] for record in records} == {victim}
    assert {record["contributions"][0]["culprit_pid"] for record in records} == {aggressor}


def test_one_look_without_a_daemon_shows_what_runs_now(tmp_path: Path) -> None:
    with scenario("gpu", SECONDS, seed=3) as programs:
        command = [sys.executable, "-m", "gputail", "top", "--socket", str(tmp_path / "socket"), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
        programs.stop()
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)
    (victim,) = [workload for workload in message["workloads"] if workload["comm"] == "victim"]
    assert victim["requests"] > 100 and victim["recent"]["p50_ns"] > 0
    assert time.monotonic_ns() > message["time_ns"] > 0
