"""The control socket: its protocol, its bounds, and that no client can do more than look."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from gputail.errors import GputailError
from gputail.surfaces import control
from gputail.surfaces.client import Client, NoDaemon
from gputail.surfaces.control import MAX_CLIENTS, MAX_QUEUE_BYTES, MAX_REQUEST_BYTES, ControlServer
from tests.unit.snapshots import NOW_NS, S, outlier, snapshot, view

DAEMON = {"pid": 7, "version": "0.0", "start_ns": 0}
DEADLINE_S = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    made = ControlServer(str(tmp_path / "socket"), DAEMON)
    made.publish(snapshot(view(1000), view(1001, outliers=0)))
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def connect(server: ControlServer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(DEADLINE_S)
    made.connect(server.path)
    return made


def said(connection: socket.socket) -> list[dict[str, Any]]:
    """Everything until the other side hangs up."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return [json.loads(line) for line in received.splitlines()]


def test_a_snapshot_has_the_figures_of_each_workload(server: ControlServer) -> None:
    with Client(server.path) as client:
        message = client.ask(get="snapshot")
    assert (message["v"], message["type"], message["daemon"]) == (1, "snapshot", DAEMON)
    assert (message["time_ns"], message["events"], message["lost"]) == (NOW_NS, 123_456, {})
    assert message["health"]["unattached"] == {"/opt/libnccl.so.2": "no symbols"}
    slow, fine = message["workloads"]
    assert (slow["name"], slow["pid"], slow["requests"], slow["incomplete"]) == ("python3/1000/HtoD..sync", 1000, 2400, 3)
    assert slow["recent"]["requests"] == 1200 and slow["total"]["requests"] == 2400
    # The last minute is 11 whole windows of 5 s, and the open one, which has just begun.
    assert slow["recent"]["span_s"] == 55.0 and slow["recent"]["rate"] == pytest.approx(1200 / 55, abs=1e-3)
    assert slow["recent"]["outliers_per_min"] == pytest.approx(24 * 60 / 55, abs=0.01)
    assert slow["recent"]["p99_ns"] == pytest.approx(12_500_000, rel=0.01)
    assert slow["recent"]["p50_ns"] == pytest.approx(5_200_000, rel=0.02)
    assert slow["top"] == {
        "cause": "foreign_kernel",
        "share": pytest.approx(0.973, abs=1e-3),
        "culprit_pid": 556,
        "culprit": "sm90_xmma_gemm_f16",
    }
    assert fine["top"] is None and fine["outliers"] == 0
    assert len(slow["trend"]) == 24 and None not in slow["trend"]


def test_what_is_not_known_is_null_and_never_0(server: ControlServer) -> None:
    few = view(5, windows=(), recent_outliers=(), baseline_ns=None, comm=None, command=None, container=None, first_start_ns=NOW_NS)
    server.publish(snapshot(few))
    with Client(server.path) as client:
        (workload,) = client.ask(get="snapshot")["workloads"]
    for field in ("comm", "command", "container", "gpu", "baseline_ns", "top"):
        assert workload[field] is None, field
    for field in ("rate", "outliers_per_min", "p50_ns", "p99_ns", "p999_ns"):
        assert workload["recent"][field] is None, field
    assert workload["trend"] == [None] * 24


def test_a_workload_in_detail_has_bars_that_count_every_request_and_its_outliers_newest_first(server: ControlServer) -> None:
    with Client(server.path) as client:
        message = client.ask(get="workload", name="python3/1000/HtoD..sync")
        gone = client.ask(get="workload", name="python3/1/none")
    assert sum(bar["recent"] for bar in message["bars"]) == 1200
    assert sum(bar["recent"] + bar["before"] for bar in message["bars"]) == 2400
    assert [cause["cause"] for cause in message["causes"]] == ["foreign_kernel", "unknown"]
    assert sum(cause["share"] for cause in message["causes"]) == pytest.approx(1, abs=1e-3)
    assert [verdict["record"]["end_ns"] for verdict in message["outliers"]] == [NOW_NS - S, NOW_NS - 2 * S]
    assert message["outliers"][0]["story"].startswith("12.5 ms instead of 5.20 ms: 7.10 ms waiting behind kernels of pid 556")
    assert (gone["type"], gone["name"]) == ("gone", "python3/1/none")


def test_followers_get_outliers_alone_in_order_and_can_begin_with_earlier_ones(server: ControlServer) -> None:
    server.offer([outlier(end_ns=1), outlier(end_ns=2), outlier(end_ns=3, outlier=False), outlier(end_ns=4)])
    with Client(server.path) as late:
        verdicts = late.follow(follow="verdicts", recent=2)
        assert [next(verdicts)["record"]["end_ns"] for _ in range(2)] == [2, 4]
        server.offer([outlier(end_ns=5)])
        assert next(verdicts)["record"] == json.loads(json.dumps(outlier(end_ns=5).as_dict()))
    with Client(server.path) as all_of_them:
        verdicts = all_of_them.follow(follow="verdicts", recent=256)
        assert [next(verdicts)["record"]["end_ns"] for _ in range(4)] == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\n", "not a line of JSON"),
        (b"\x00\xff\xfe garbage\n", "not a line of JSON"),
        (b"[" * 4000 + b"\n", "not a line of JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"get":"snapshot"}\n', "version 1"),
        (b'{"v":2,"get":"snapshot"}\n', "version 1"),
        (b'{"v":1}\n', "unknown request"),
        (b'{"v":1,"get":"/etc/passwd"}\n', "unknown request"),
        (b'{"v":1,"get":"workload","name":5}\n', "unknown request"),
        (b'{"v":1,"get":"snapshot","follow":"verdicts"}\n', "unknown request"),
        (b'{"v":1,"follow":"verdicts","recent":-1}\n', "from 0 to 256"),
        (b'{"v":1,"follow":"verdicts","recent":true}\n', "from 0 to 256"),
        (b"x" * (MAX_REQUEST_BYTES + 1), f"longer than {MAX_REQUEST_BYTES} bytes"),
        (b'{"v":1,"get":"' + b"x" * MAX_REQUEST_BYTES + b'"}\n', "unknown request"),
    ],
)
def test_what_is_no_request_gets_one_error_and_is_hung_up_on(server: ControlServer, sent: bytes, why: str) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        (message,) = said(connection)
    assert (message["v"], message["type"]) == (1, "error")
    assert why in message["error"]
    with Client(server.path) as other:
        assert other.ask(get="snapshot")["type"] == "snapshot"


def test_a_request_may_come_in_pieces_and_several_at_once(server: ControlServer) -> None:
    request = b'{"v":1,"get":"snapshot"}\n'
    with connect(server) as connection:
        for byte in request:
            connection.send(bytes([byte]))
        connection.sendall(request * 2)
        lines = connection.makefile("rb")
        assert [json.loads(lines.readline())["type"] for _ in range(3)] == ["snapshot"] * 3


def test_a_client_that_reads_nothing_has_one_answer_waiting_and_no_more_of_its_requests_are_read(server: ControlServer) -> None:
    server.publish(snapshot(*[view(pid) for pid in range(300)]))
    with connect(server) as connection:
        connection.setblocking(False)
        sent = 0
        try:
            while sent < 8 << 20:
                sent += connection.send(b'{"v":1,"get":"snapshot"}\n' * 100)
        except BlockingIOError:
            pass
        else:
            pytest.fail("8 MiB of requests were taken in from a client that reads no answer")
        wait_until(lambda: any(client.out for client in server._clients.values()))
        (client,) = server._clients.values()
        with Client(server.path) as other:
            one = len(json.dumps(other.ask(get="snapshot")))
        assert client.out_bytes <= one
        assert len(client.inbox) <= 2 * MAX_REQUEST_BYTES


def test_a_slow_follower_is_told_exactly_how_many_verdicts_it_has_missed_and_the_others_miss_none(server: ControlServer) -> None:
    total, each = 8000, 500
    with connect(server) as slow, connect(server) as quick:
        for connection in (slow, quick):
            connection.sendall(b'{"v":1,"follow":"verdicts"}\n')
        wait_until(lambda: sum(client.is_following for client in server._clients.values()) == 2)
        lines = quick.makefile("rb")
        for first in range(0, total, each):
            server.offer([outlier(end_ns=number) for number in range(first, first + each)])
            assert [json.loads(lines.readline())["record"]["end_ns"] for _ in range(each)] == list(range(first, first + each))
        assert MAX_QUEUE_BYTES // 2 < max(client.out_bytes for client in server._clients.values()) <= MAX_QUEUE_BYTES
        taken = slow.makefile("rb")
        seen = [json.loads(taken.readline())["record"]["end_ns"]]
        # It is told with the next verdict for which there is room.
        wait_until(lambda: _takes_some(taken, seen) and not any(client.out for client in server._clients.values()))
        server.offer([outlier(end_ns=total)])
        while (message := json.loads(taken.readline()))["type"] == "verdict":
            seen.append(message["record"]["end_ns"])
        assert seen == list(range(len(seen)))
        assert message == {"v": 1, "type": "lost", "count": total - len(seen)}
        assert json.loads(taken.readline())["record"]["end_ns"] == total


def _takes_some(lines: BinaryIO, seen: list[int]) -> bool:
    """Read some more verdicts, fewer than the socket itself holds; true, so that a condition can begin with it."""
    seen += [json.loads(lines.readline())["record"]["end_ns"] for _ in range(20)]
    return True


def test_news_beyond_the_bound_are_counted_before_they_reach_the_thread(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_NEWS", 10)
    with Client(server.path) as client:
        client._send({"follow": "verdicts"})
        wait_until(lambda: any(client.is_following for client in server._clients.values()))
        server.offer([outlier(end_ns=number) for number in range(25)])
        counted = [client._receive() for _ in range(11)]
        assert counted[0] == {"v": 1, "type": "lost", "count": 15}
        assert [message["record"]["end_ns"] for message in counted[1:]] == list(range(10))


def test_clients_beyond_the_bound_are_told_and_the_next_finds_room_again(server: ControlServer) -> None:
    held = [connect(server) for _ in range(MAX_CLIENTS)]
    wait_until(lambda: len(server._clients) == MAX_CLIENTS)
    with connect(server) as one_too_many:
        (message,) = said(one_too_many)
        assert f"{MAX_CLIENTS} clients" in message["error"]
    for connection in held:
        connection.close()
    wait_until(lambda: not server._clients)
    with Client(server.path) as client:
        assert client.ask(get="snapshot")["type"] == "snapshot"


def test_clients_that_hang_up_at_any_point_are_forgotten(server: ControlServer) -> None:
    server.publish(snapshot(*[view(pid) for pid in range(100)]))
    for sent in (b"", b'{"v":1', b'{"v":1,"get":"snapshot"}\n', b'{"v":1,"follow":"verdicts"}\n'):
        with connect(server) as connection:
            connection.sendall(sent)
        server.offer([outlier()])
    wait_until(lambda: not server._clients)


def test_a_client_that_takes_nothing_for_long_is_let_go(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish(snapshot(*[view(pid) for pid in range(500)]))
    monkeypatch.setattr(control, "STALLED_S", 0.0)
    with connect(server) as connection:
        connection.sendall(b'{"v":1,"get":"snapshot"}\n')
        wait_until(lambda: not server._clients)


def test_who_may_look_is_up_to_the_permissions_of_the_socket(server: ControlServer) -> None:
    mode = os.stat(server.path).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o660


def test_the_socket_goes_with_its_daemon(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "socket"
    ControlServer(str(path), DAEMON).close()
    assert not path.exists()
    with pytest.raises(NoDaemon, match="no gputail daemon serves"):
        Client(str(path))


def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    code = f"import os; from gputail.surfaces.control import ControlServer; ControlServer({path!r}, {{}}); os.kill(os.getpid(), 9)"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=False)
        assert stat.S_ISSOCK(os.stat(path).st_mode)
    server = ControlServer(path, DAEMON)
    server.publish(snapshot())
    with Client(path) as client:
        assert client.ask(get="snapshot")["workloads"] == []
    server.close()
    assert sorted(os.listdir(tmp_path)) == ["socket.lock"]


def test_a_socket_that_is_served_is_an_error_naming_who_serves_it(server: ControlServer) -> None:
    with pytest.raises(GputailError, match=rf"another gputail \(pid {os.getpid()}\) serves the control socket {server.path}"):
        ControlServer(server.path, DAEMON)
    with Client(server.path) as client:
        assert client.ask(get="snapshot")["type"] == "snapshot"


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("precious")
    with pytest.raises(GputailError, match="a file that is no socket is in the way"):
        ControlServer(str(path), DAEMON)
    assert path.read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(GputailError, match="cannot make the control socket") as caught:
        ControlServer(str(tmp_path / "not" / "there" / "socket"), DAEMON)
    assert "--socket off" in caught.value.hint


def test_what_does_not_speak_the_protocol_is_one_clear_error(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        for answer in (b"220 mail ready\n", b"[]\n", b'{"type":5}\n', b"\xff\n"):
            client = Client(path)
            connection, _ = listener.accept()
            with client, connection:
                connection.sendall(answer)
                with pytest.raises(GputailError, match="does not speak gputail's protocol"):
                    client.ask(get="snapshot")
        client = Client(path)
        connection, _ = listener.accept()
        connection.sendall(b'{"v":1,"type":"snap')
        connection.close()
        with client, pytest.raises(NoDaemon, match="is gone"):
            client.ask(get="snapshot")
