"""The control socket: whoever may open it can look at snapshots and follow verdicts (docs/control-protocol.md).

In come the latest snapshot and the latest records, out go lines of JSON to local clients. All of it happens in a thread of its own:
`publish` and `offer` only leave something there for it. What a client can make us keep is bounded, and what a slow one misses is
counted and told to it. What messages say is left to messages.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gputail.errors import GputailError
from gputail.snapshot import Snapshot
from gputail.surfaces import messages
from gputail.surfaces.jsonl import line
from gputail.tail import RequestRecord

MODE = 0o660
MAX_CLIENTS = 32
MAX_REQUEST_BYTES = 4096
MAX_QUEUE_BYTES = 1 << 20  # of verdicts that wait for a client
MAX_NEWS = 4096  # verdicts that wait for the thread
RECENT = 256  # verdicts that a follower can ask for from before
STALLED_S = 30.0  # a client that takes nothing of what waits for it is let go
_TICK_S = 1.0


class RequestRefused(Exception):
    """A request that is not answered, and why."""


class _Client:
    """One connection: what it sent that is no whole line yet, and what waits to be sent to it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = bytearray()
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0
        self.is_following = self.is_closing = False
        self.lost = 0
        self.since = time.monotonic()  # when it last took something

    def put(self, message: bytes) -> None:
        if not self.out:
            self.since = time.monotonic()
        self.out.append(memoryview(message))
        self.out_bytes += len(message)

    def put_verdict(self, message: bytes) -> None:
        """A verdict, or in its place a count of those that found no room."""
        if self.lost and self.out_bytes <= MAX_QUEUE_BYTES // 2:
            self.put(encoded({"v": messages.VERSION, "type": "lost", "count": self.lost}))
            self.lost = 0
        if self.lost or self.out_bytes + len(message) > MAX_QUEUE_BYTES:
            self.lost += 1
        else:
            self.put(message)

    def send(self) -> None:
        while self.out:
            first = self.out[0]
            try:
                sent = self.connection.send(first, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self.since = time.monotonic()
            self.out_bytes -= sent
            if sent < len(first):
                self.out[0] = first[sent:]
                return
            self.out.popleft()


def encoded(message: Mapping[str, Any]) -> bytes:
    return line(message).encode("ascii") + b"\n"


def parse(text: bytes) -> tuple[str, str, int]:
    """A request as (what, name of a workload, count of recent verdicts). Raises RequestRefused."""
    try:
        request = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestRefused("not a line of JSON") from None
    if not isinstance(request, dict):
        raise RequestRefused("not a JSON object")
    if request.get("v") != messages.VERSION:
        raise RequestRefused(f"this daemon speaks version {messages.VERSION} of the protocol")
    get, follow, name, count = (request.get(key) for key in ("get", "follow", "name", "recent"))
    if get == "snapshot" and follow is None:
        return "snapshot", "", 0
    if get == "workload" and follow is None and isinstance(name, str):
        return "workload", name, 0
    if follow == "verdicts" and get is None:
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= RECENT):
            raise RequestRefused(f'"recent" must be a number from 0 to {RECENT}')
        return "verdicts", "", count or 0
    raise RequestRefused('unknown request; there are {"get":"snapshot"}, {"get":"workload","name":NAME}, {"follow":"verdicts"}')


class ControlServer:
    """Serves until closed. GputailError where the socket cannot be made, or another daemon serves it."""

    def __init__(self, path: str, daemon: Mapping[str, Any]) -> None:
        self.path = path
        self._daemon = daemon
        self._latest: Snapshot | None = None
        self._encoded: tuple[Snapshot | None, bytes] = (None, b"")
        self._news: deque[RequestRecord] = deque()
        self._news_lost = self._news_lost_told = 0  # each written by one thread alone
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self._is_stopped = False
        try:
            self._lock, self._listener = _listen(path)
        except OSError as error:
            raise GputailError(
                f"cannot make the control socket {path}: {(error.strerror or str(error)).lower()}",
                "choose another with --socket PATH, or none with --socket off",
            ) from error
        self._inode = os.lstat(path).st_ino
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[int, _Client] = {}
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def publish(self, snapshot: Snapshot) -> None:
        """Make this snapshot the one that clients get. Takes no time: it is put into words when asked for."""
        self._latest = snapshot

    def offer(self, records: Iterable[RequestRecord]) -> None:
        """Hand the outliers among the records to followers. Takes no time, whoever follows."""
        outliers = [record for record in records if record.outlier]
        if not outliers:
            return
        room = max(MAX_NEWS - len(self._news), 0)
        self._news.extend(outliers[:room])
        self._news_lost += len(outliers[room:])
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Let clients go and take the socket away."""
        self._is_stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)
        with suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        os.close(self._lock)

    def _serve(self) -> None:
        while not self._is_stopped:
            for key, events in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                elif (client := self._clients.get(key.fd)) is not None:
                    self._attend(client, events)
            self._tell_news()
            for client in list(self._clients.values()):
                self._settle(client)
        self._tell_news()
        for client in list(self._clients.values()):  # what the socket takes now; nobody is waited for
            with suppress(OSError):
                client.send()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone already, or no descriptor left: they will try again
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._clients) > MAX_CLIENTS:
            self._refuse(client, f"there are {MAX_CLIENTS} clients already")

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                received = client.connection.recv(MAX_REQUEST_BYTES)
                if not received:
                    self._drop(client)
                    return
                if not client.is_closing:
                    client.inbox += received
            if events & selectors.EVENT_WRITE:
                client.send()
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _settle(self, client: _Client) -> None:
        """Answer what it has asked, send what it takes, and say what is to be waited for next."""
        try:
            # One answer at a time: whoever does not read them is not asked for more requests.
            while not client.out and not client.is_closing and (end := client.inbox.find(b"\n")) >= 0:
                request = bytes(client.inbox[:end])
                del client.inbox[: end + 1]
                self._answer(client, request)
                client.send()
            if not client.is_closing and b"\n" not in client.inbox and len(client.inbox) > MAX_REQUEST_BYTES:
                self._refuse(client, f"a request is longer than {MAX_REQUEST_BYTES} bytes")
            if client.out:
                client.send()
        except OSError:
            self._drop(client)
            return
        if (client.is_closing and not client.out) or (client.out and time.monotonic() - client.since > STALLED_S):
            self._drop(client)
            return
        is_wanted = not client.is_closing and len(client.inbox) <= MAX_REQUEST_BYTES
        events = (selectors.EVENT_READ if is_wanted else 0) | (selectors.EVENT_WRITE if client.out else 0)
        self._selector.modify(client.connection, events)

    def _answer(self, client: _Client, text: bytes) -> None:
        try:
            what, name, count = parse(text)
            if what == "verdicts":
                client.is_following = True
                for message in list(self._recent)[max(len(self._recent) - count, 0) :]:
                    client.put_verdict(message)
                return
            snapshot = self._latest
            if snapshot is None:
                raise RequestRefused("there is no snapshot yet")
            if what == "snapshot":
                if self._encoded[0] is not snapshot:
                    self._encoded = (snapshot, encoded(messages.snapshot(snapshot, self._daemon)))
                client.put(self._encoded[1])
                return
            found = messages.workload(snapshot, name)
            # Not a reason to hang up: workloads go while somebody looks at them.
            client.put(encoded(found or {"v": messages.VERSION, "type": "gone", "name": name}))
        except RequestRefused as refused:
            self._refuse(client, str(refused))

    def _refuse(self, client: _Client, why: str) -> None:
        client.put(encoded({"v": messages.VERSION, "type": "error", "error": why}))
        client.is_closing = True

    def _tell_news(self) -> None:
        lost_in_all = self._news_lost
        lost, self._news_lost_told = lost_in_all - self._news_lost_told, lost_in_all
        followers = [client for client in self._clients.values() if client.is_following]
        for client in followers:
            client.lost += lost
        for _ in range(len(self._news)):
            message = encoded(messages.verdict(self._news.popleft()))
            self._recent.append(message)
            for client in followers:
                client.put_verdict(message)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._selector.unregister(client.connection)
        client.connection.close()


def _listen(path: str) -> tuple[int, socket.socket]:
    """A descriptor that holds the lock beside the socket, and the socket. What a dead daemon left there is replaced."""
    Path(path).parent.mkdir(mode=0o755, exist_ok=True)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    listener = None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(lock, 16).decode("ascii", "replace").strip()
            raise GputailError(
                f"another gputail (pid {pid or 'unknown'}) serves the control socket {path}",
                "look at it with gputail top, or run this one with --socket off",
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, b"%d\n" % os.getpid())
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise FileExistsError(None, "a file that is no socket is in the way")
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        listener.bind(path)
        os.chmod(path, MODE)  # before anybody can connect
        listener.listen(MAX_CLIENTS)
        return lock, listener
    except BaseException:
        if listener is not None:
            listener.close()
        os.close(lock)
        raise
