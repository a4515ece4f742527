"""The daemon as a service: what it tells its manager and when, what a reload changes, and that the unit's capabilities suffice."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gputail.probes import capabilities
from tests import units

from .conftest import free_port, wait_until
from .test_daemon import sample, scrape

# A session without a terminal, as a service has: there SIGHUP reloads.
DETACHED = ("setsid",)
NOBODY = 65534
# prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN), which Linux 6.3 has.
DENY_WRITE_EXECUTE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class Manager:
    """A service manager's end of NOTIFY_SOCKET, and all that it has heard."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "100000"}
        self.heard: list[str] = []

    def hears(self, first: str, after: int = 0) -> int:
        """Wait for a message that begins so, beyond the first `after`; its number."""
        found: list[int] = []

        def is_there() -> bool:
            try:
                while True:
                    self.heard.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                pass
            found[:] = [number for number, text in enumerate(self.heard) if number >= after and text.startswith(first)]
            return bool(found)

        wait_until(is_there, f"{first} to the service manager")
        return found[0]


@pytest.fixture
def manager(tmp_path):
    made = Manager(tmp_path / "notify")
    yield made
    made._socket.close()


def test_the_manager_hears_of_start_progress_reload_and_end_in_that_order(bare, gputail, manager, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("")
    arguments = ("run", "--library", str(bare[0]), "--listen", "off", "--socket", "off", "--config", str(config))
    running = gputail(*arguments, prefix=DETACHED, environment=manager.environment)
    ready = manager.hears("READY=1\nSTATUS=tracing ")
    assert manager.heard[0] == "STATUS=compiling and attaching probes"
    assert not any(message.startswith("WATCHDOG") for message in manager.heard[:ready])
    fed = manager.hears("WATCHDOG=1", ready)
    fed = manager.hears("WATCHDOG=1", fed + 1)
    running.process.send_signal(signal.SIGHUP)
    reloading = manager.hears("RELOADING=1\nMONOTONIC_USEC=", fed)
    again = manager.hears("READY=1", reloading)
    fed = manager.hears("WATCHDOG=1", again)
    assert running.end() == 0
    manager.hears("STOPPING=1", fed)
    assert "configuration reloaded; changed: nothing" in running.stderr


def test_a_start_that_fails_is_told_with_its_reason(gputail, manager, tmp_path):
    running = gputail("run", "--library", str(tmp_path / "none"), "--listen", "off", environment=manager.environment)
    manager.hears(f"STOPPING=1\nSTATUS=failed: cannot open the library {tmp_path / 'none'}")
    assert running.process.wait() == 1
    assert not any(message.startswith("READY") for message in manager.heard)


def test_a_reload_changes_what_can_be_and_names_the_rest(bare, caller, gputail, manager, tmp_path):
    config, lines, first, second = tmp_path / "config.toml", tmp_path / "lines", free_port(), free_port()
    config.write_text(f'listen = "127.0.0.1:{first}"\njsonl = "{lines}"\nsocket = "{tmp_path}/a"\n')
    arguments = ("run", "--library", str(bare[0]), "--config", str(config))
    running = gputail(*arguments, prefix=DETACHED, environment=manager.environment)
    ready = manager.hears("READY=1")
    program = caller("request", calls=23)
    for _ in range(40):
        program.call()
    wait_until(lambda: lines.read_text().count("\n") == 40, "40 records")
    lines.rename(tmp_path / "rotated")
    config.write_text(
        f'listen = "127.0.0.1:{second}"\njsonl = "{lines}"\nsocket = "{tmp_path}/b"\nflush_ms = 20\nbudget_percent = 2\ntier = "light"\n'
    )
    running.process.send_signal(signal.SIGHUP)
    reloading = manager.hears("RELOADING=1", ready)
    manager.hears("READY=1", reloading)
    for _ in range(40):
        program.call()
    count = 'call_duration_seconds_count{call="cuLaunchKernel"} '
    wait_until(lambda: f"{count}{2 * 40 * 23}.0" in scrape(second), "all launches in the scrape")  # none lost, none begun anew
    wait_until(lambda: lines.read_text().count("\n") == 40, "40 records more")
    assert running.end() == 0
    records = [json.loads(line) for path in (tmp_path / "rotated", lines) for line in path.read_text().splitlines()]
    assert [record["launches"] for record in records] == [23] * 80
    with pytest.raises(OSError):
        scrape(first)
    assert f"tier ({config}:6) has changed, which takes a restart" in running.stderr
    assert "configuration reloaded; changed: jsonl" not in running.stderr  # opened anew, but where it was
    assert "configuration reloaded; changed: listen, socket, flush_ms, budget_percent" in running.stderr
    assert "lost: nothing" in running.stderr


def test_a_reload_that_cannot_be_carried_out_leaves_things_as_they_were(bare, gputail, manager, tmp_path):
    config, port = tmp_path / "config.toml", free_port()
    config.write_text(f'listen = "127.0.0.1:{port}"\nsocket = "off"\n')
    arguments = ("run", "--library", str(bare[0]), "--config", str(config))
    running = gputail(*arguments, prefix=DETACHED, environment=manager.environment)
    ready = manager.hears("READY=1")
    config.write_text("\nlisen = 1\n")
    running.process.send_signal(signal.SIGHUP)
    manager.hears("READY=1\nSTATUS=tracing", manager.hears("RELOADING=1", ready))
    assert f"configuration refused: {config}:2: unknown key 'lisen'" in manager.heard[-1]
    assert f"configuration not reloaded: {config}:2: unknown key 'lisen'; did you mean 'listen'?" in running.stderr
    assert sample(scrape(port), "gputail_attached_functions") >= 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config.write_text(f'listen = "127.0.0.1:{taken.getsockname()[1]}"\nsocket = "off"\nflush_ms = 30\n')
        again = len(manager.heard)
        running.process.send_signal(signal.SIGHUP)
        manager.hears("READY=1", manager.hears("RELOADING=1", again))
    assert "listen not changed: cannot serve metrics on" in running.stderr
    assert "configuration reloaded; changed: flush_ms" in running.stderr
    assert sample(scrape(port), "gputail_attached_functions") >= 2
    assert running.end() == 0


def nobody_with(names: list[str]) -> tuple[str, ...]:
    """Starts a program as nobody with exactly these capabilities, whatever it executes."""
    numbers = [f"+cap_{capabilities.BITS[name]}" for name in names]  # by number: libcap-ng 0.7 has no names for the later ones
    held = ",".join(["-all", *numbers])
    dropped = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")
    return (*dropped, f"--inh-caps={held}", f"--ambient-caps={held}", f"--bounding-set={held}")


def test_what_the_unit_allows_is_enough_to_find_and_trace_other_users_programs(caller, gputail):
    """As nobody with the unit's capabilities alone, and no memory both writable and executable; the traced program is root's."""
    assert units.settings()["MemoryDenyWriteExecute"] == ["yes"]
    port = free_port()
    program = caller(calls=23)  # has its library mapped already, and nobody says where that is
    prefix = (sys.executable, "-c", DENY_WRITE_EXECUTE, *nobody_with(units.capabilities()))
    running = gputail("run", "--listen", f"127.0.0.1:{port}", "--socket", "off", prefix=prefix)
    running.wait_for("tracing")
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    mask = sum(1 << capabilities.BITS[name] for name in units.capabilities())
    assert f"CapEff:\t{mask:016x}\nCapBnd:\t{mask:016x}\n" in status
    assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}\n" in status
    program.call()
    wait_until(lambda: 'call_duration_seconds_count{call="cuLaunchKernel"} 23.0' in scrape(port), "23 launches in the scrape")
    assert running.end() == 0
    assert "lost: nothing" in running.stderr


def test_with_little_memory_to_lock_rings_are_smaller_and_that_is_said(bare, caller, gputail):
    """As in a container whose runtime has the usual limit, on a machine of many CPUs."""
    port = free_port()
    arguments = ("run", "--library", str(bare[0]), "--listen", f"127.0.0.1:{port}", "--socket", "off")
    running = gputail(*arguments, prefix=("prlimit", "--memlock=65536", *nobody_with(units.capabilities())))
    running.wait_for("tracing")
    caller(calls=23).call()
    wait_until(lambda: 'call_duration_seconds_count{call="cuLaunchKernel"} 23.0' in scrape(port), "23 launches in the scrape")
    assert running.end() == 0
    assert "rings are small" in running.stderr
    assert "has no ring" not in running.stderr


@pytest.mark.parametrize("name", units.capabilities())
def test_without_any_one_of_the_units_capabilities_something_is_missed_and_said(gputail, name):
    checked = gputail("check", prefix=nobody_with([other for other in units.capabilities() if other != name]), stdout=subprocess.PIPE)
    assert f"without {name}" in checked.process.communicate()[0]
