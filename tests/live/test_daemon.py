"""`run` and `record` as processes: what they say, when they end, and what stays of what they gathered."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import urllib.request

import numpy as np
import pytest

from gputail.capture import CaptureReader, CaptureWriter
from gputail.events import Batch
from gputail.pipeline import Pipeline
from gputail.probes import capabilities
from gputail.probes.table import BY_SYMBOL, OFF_CPU_CALL
from gputail.probes.tracer import TraceOptions, Tracer

from .conftest import DEADLINE_S, free_port, wait_until

LAUNCH = BY_SYMBOL["cuLaunchKernel"].number


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return answer.read().decode()


def sample(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in the scrape"
    return float(found[1])


def test_run_counts_every_call_and_ends_cleanly_on_sigterm(bare, caller, gputail):
    port = free_port()
    running = gputail("run", "--library", str(bare[0]), "--listen", f"127.0.0.1:{port}")
    running.wait_for("tracing")
    program = caller(calls=23)
    program.call()
    wait_until(lambda: 'call_duration_seconds_count{call="cuLaunchKernel"} 23.0' in scrape(port), "23 launches in the scrape")
    assert sample(scrape(port), "gputail_attached_functions") >= 2
    assert running.end(signal.SIGTERM) == 0
    assert "lost: nothing" in running.stderr
    assert "Traceback" not in running.stderr


def test_three_calls_and_then_silence_are_seen(bare, caller, gputail):
    port = free_port()
    gputail("run", "--library", str(bare[0]), "--listen", f"127.0.0.1:{port}").wait_for("tracing")
    caller(calls=3).call()
    wait_until(lambda: 'call_duration_seconds_count{call="cuLaunchKernel"} 3.0' in scrape(port), "3 launches in the scrape")


def test_a_flood_delays_neither_a_scrape_nor_the_end(bare, caller, gputail):
    port = free_port()
    running = gputail("run", "--library", str(bare[0]), "--listen", f"127.0.0.1:{port}")
    running.wait_for("tracing")
    program = caller(calls=200_000)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            program.call()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        before = sample(scrape(port), "gputail_events_total")
        wait_until(lambda: sample(scrape(port), "gputail_events_total") > before + 400_000, "events of the flood")
        assert running.end() == 0
    finally:
        over.set()
        flooding.join()


def test_json_lines_hold_the_fixed_fields_and_the_calls_made(bare, caller, gputail, tmp_path):
    out = tmp_path / "requests.jsonl"
    running = gputail("run", "--library", str(bare[0]), "--listen", "off", "--jsonl", str(out))
    running.wait_for("tracing")
    program = caller("request", calls=23)
    for _ in range(40):
        program.call()
    assert running.end() == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    fields = "schema pid tid comm workload start_ns end_ns duration_ns boundary calls launches incomplete outlier".split()
    for record in records:
        assert set(fields) <= record.keys()
        assert record["schema"] == 1
        assert record["duration_ns"] == record["end_ns"] - record["start_ns"]
    mine = [record for record in records if record["pid"] == program.pid]
    assert [record["calls"] for record in mine] == [24] * 40
    assert [record["launches"] for record in mine] == [23] * 40


def test_only_the_pid_asked_for_is_traced(bare, caller, gputail, tmp_path):
    wanted, other = caller(calls=23), caller(calls=29)
    out = tmp_path / "wanted.gpt"
    running = gputail("record", "-o", str(out), "--library", str(bare[0]), "-p", str(wanted.pid))
    running.wait_for("tracing")
    other.call()
    wanted.call()
    assert running.end() == 0
    assert launches(out) == {wanted.pid: 23}


def launches(path) -> dict[int, int]:
    """Launches in a recording, by process."""
    with CaptureReader(str(path)) as reader:
        calls = np.concatenate([batch.calls for batch in reader])
        assert reader.damage is None
    pids, counts = np.unique(calls["tgid"][calls["call"] == LAUNCH], return_counts=True)
    return dict(zip(pids.tolist(), counts.tolist()))


def test_a_command_is_traced_from_its_first_call_with_its_children_and_ends_the_run(bare, gputail, tmp_path):
    out = tmp_path / "command.gpt"
    script = f"printf '\\n' | {bare[1]} launch 23 >/dev/null & printf '\\n' | {bare[1]} launch 29 >/dev/null; wait"
    running = gputail("record", "-o", str(out), "--library", str(bare[0]), "--", "/bin/sh", "-c", script)
    assert running.process.wait(DEADLINE_S) == 0
    assert sorted(launches(out).values()) == [23, 29]


def test_a_command_that_cannot_run_is_one_clear_line(bare, gputail):
    running = gputail("run", "--listen", "off", "--library", str(bare[0]), "--", "/nonexistent/program")
    assert running.process.wait(DEADLINE_S) == 1
    assert "cannot run /nonexistent/program: No such file or directory" in running.stderr
    assert "Traceback" not in running.stderr


def test_a_port_in_use_is_one_clear_line_naming_it(bare, gputail):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        running = gputail("run", "--library", str(bare[0]), "--listen", address)
        assert running.process.wait(DEADLINE_S) == 1
    assert f"cannot serve metrics on {address}" in running.stderr
    assert "Traceback" not in running.stderr


@pytest.mark.parametrize("content", [b"", b"no ELF at all", b"\x7fELF" + b"\xff" * 60, b"\x7fELF\x02\x01\x01" + b"\0" * 57])
def test_a_library_that_is_none_is_one_clear_line_naming_it(gputail, tmp_path, content):
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(content)
    running = gputail("run", "--library", str(path), "--listen", "off")
    assert running.process.wait(DEADLINE_S) == 1
    assert str(path) in running.stderr
    assert "Traceback" not in running.stderr


def test_without_root_one_line_says_what_to_do(gputail):
    unprivileged = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")
    running = gputail("run", "--listen", "off", prefix=unprivileged)
    assert running.process.wait(DEADLINE_S) == 1
    assert "run as root" in running.stderr
    assert "Traceback" not in running.stderr


@pytest.mark.parametrize("lacking", ["CAP_BPF", "CAP_PERFMON"])
def test_a_missing_capability_is_named(gputail, lacking):
    dropped = ("setpriv", f"--bounding-set=-sys_admin,-cap_{capabilities.BITS[lacking]}")
    running = gputail("run", "--listen", "off", prefix=dropped)
    assert running.process.wait(DEADLINE_S) == 1
    problem, hint = running.stderr.splitlines()[-2:]
    assert problem == f"gputail: cannot load BPF programs without {lacking}"
    assert "CAP_BPF and CAP_PERFMON" in hint
    checked = gputail("check", prefix=dropped, stdout=subprocess.PIPE)
    assert f"without {lacking}" in checked.process.communicate()[0]
    assert checked.process.returncode == 1


def test_the_two_capabilities_that_are_needed_are_enough_for_own_processes(gputail):
    needed = [f"+cap_{capabilities.BITS[name]}" for name in capabilities.NEEDED]  # by number: libcap-ng 0.7 has no names for them
    only = ("setpriv", f"--bounding-set={','.join(['-all', *needed, '+dac_read_search'])}")
    running = gputail("run", "--listen", "off", "--duration", "0.5", prefix=only)
    assert running.process.wait(DEADLINE_S) == 0, running.stderr


def test_without_tracefs_one_line_says_how_to_mount_it(gputail):
    hidden = ("unshare", "--mount", "sh", "-c", 'umount -l /sys/kernel/tracing; umount -l /sys/kernel/debug 2>/dev/null; exec "$@"', "sh")
    running = gputail("run", "--listen", "off", prefix=hidden)
    assert running.process.wait(DEADLINE_S) == 1
    assert "mount -t tracefs" in running.stderr
    assert "Traceback" not in running.stderr


def test_a_full_disk_ends_a_recording_that_stays_readable(bare, caller, gputail, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        out = disk / "full.gpt"
        running = gputail("record", "-o", str(out), "--library", str(bare[0]))
        running.wait_for("tracing")
        program = caller(calls=100_000)
        while running.process.poll() is None:
            program.call()
        assert running.process.returncode == 1
        assert str(out) in running.stderr and "no space left on device" in running.stderr.lower()
        assert "Traceback" not in running.stderr
        with CaptureReader(str(out)) as reader:
            assert sum(len(batch.calls) for batch in reader) > 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_replay_gives_exactly_what_the_live_run_gave(bare, caller, tmp_path):
    out = tmp_path / "both.gpt"
    live = Pipeline()
    tracer = Tracer(TraceOptions(libraries=(str(bare[0]),)))
    try:
        programs = [caller("request", calls=23), caller("request", calls=5)]
        with CaptureWriter(str(out)) as writer:

            def take(batch: Batch) -> None:
                writer.write(batch)
                live.feed(batch)

            for _ in range(50):
                for program in programs:
                    program.call()
                take(tracer.poll())
            take(tracer.finish())
        live.finish()
    finally:
        tracer.close()
    again = Pipeline()
    with CaptureReader(str(out)) as reader:
        for batch in reader:
            again.feed(batch)
    again.finish()
    expected = [record.as_dict() for record in live.take_records()]
    assert len(expected) == 2 * 50
    assert [record.as_dict() for record in again.take_records()] == expected
    assert again.snapshot().events == live.snapshot().events
    assert live.snapshot().calls["cuLaunchKernel"].count == 50 * (23 + 5)


def test_no_probe_stays_behind_when_it_is_killed(bare, caller, gputail):
    running = gputail("run", "--library", str(bare[0]), "--listen", "off")
    running.wait_for("tracing")
    running.process.kill()
    running.process.wait()
    # A probe that stayed would cost every later tracer's orphaned returns: a new one sees exactly its own.
    tracer = Tracer(TraceOptions(libraries=(str(bare[0]),)))
    try:
        caller(calls=23).call()
        batch = tracer.finish()
        assert int((batch.calls["call"] == LAUNCH).sum()) == 23
        assert set(np.unique(batch.calls["call"])) <= {LAUNCH, OFF_CPU_CALL}
    finally:
        tracer.close()
