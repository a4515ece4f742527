"""The other side of the control socket: requests out, messages in.

In goes the path of the socket, out come messages as dictionaries (docs/control-protocol.md). Blocking; what is done about a daemon
that is not there, or goes away, is left to the caller.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from gputail.errors import GputailError

VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
ANSWER_S = 10.0


class NoDaemon(GputailError):
    """Nobody serves the socket, or whoever did is gone."""


def request(**fields: object) -> bytes:
    """A request as it goes over the socket."""
    return json.dumps({"v": VERSION, **fields}).encode("ascii") + b"\n"


def decoded(line: bytes, path: str) -> dict[str, Any]:
    """A message. GputailError where it is none, or says that something was refused."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise GputailError(f"what serves {path} does not speak gputail's protocol", "is it another program's socket?")
    if message["type"] == "error":
        raise GputailError(f"the daemon refused: {str(message.get('error'))[:200]}")
    if message.get("v") != VERSION:
        raise GputailError(f"the daemon at {path} speaks another version of the protocol", "use the gputail that it was started with")
    return message


def cannot_connect(path: str, error: OSError) -> GputailError:
    """What it means that the socket cannot be opened."""
    if isinstance(error, PermissionError):
        return GputailError(f"cannot look at {path}: permission denied", "run as root, or as a member of the socket's group")
    if isinstance(error, (FileNotFoundError, ConnectionError)):
        return NoDaemon(f"no gputail daemon serves {path}", "start one with gputail run, or name its socket with --socket PATH")
    return GputailError(f"cannot connect to {path}: {(error.strerror or str(error)).lower()}")


class Client:
    """A connection. GputailError where none can be made, NoDaemon when it ends."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise cannot_connect(path, error) from error
        self._file = self._socket.makefile("rb")

    def ask(self, **fields: object) -> dict[str, Any]:
        """One request and its answer."""
        self._send(fields)
        return self._receive()

    def follow(self, **fields: object) -> Iterator[dict[str, Any]]:
        """One request and whatever comes from then on."""
        self._send(fields)
        self._socket.settimeout(None)
        while True:
            yield self._receive()

    def _send(self, fields: dict[str, object]) -> None:
        try:
            self._socket.sendall(request(**fields))
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._file.readline(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise GputailError(f"the daemon at {self.path} does not answer") from error
        except OSError as error:
            raise self._gone() from error
        if not line.endswith(b"\n"):
            raise self._gone()
        return decoded(line, self.path)

    def _gone(self) -> NoDaemon:
        return NoDaemon(f"the gputail daemon that served {self.path} is gone")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
