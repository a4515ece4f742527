"""What the service manager is told: the protocol of sd_notify(3), datagrams of VARIABLE=VALUE lines to the socket that it names.

In: the environment, and what happens. Where no service manager started us, or it does not listen, nobody is told and nothing
fails. Messages are those of systemd; when to send which is the daemon's to know.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
MAX_STATUS_CHARS = 500


class ServiceManager:
    """Whoever started us as a service, or nobody."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes the variables of the protocol out of the environment, so that no program that we start speaks in our name."""
        address, interval_us, pid = (environ.pop(name, "") for name in _VARIABLES)
        self._socket: socket.socket | None = None
        # The watchdog may be meant for another process, whose variables were inherited.
        is_watched = interval_us.isascii() and interval_us.isdigit() and pid in ("", str(os.getpid()))
        self._watchdog_s = int(interval_us) / 1e6 / 2 if is_watched else None  # half, as sd_watchdog_enabled(3) recommends
        self._fed_at = -float("inf")
        self._progress_ns = -1
        self._status = ""
        if address.startswith(("/", "@")):
            self._address = address.replace("@", "\0", 1) if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def ready(self, status: str) -> None:
        """It has started, or has taken in its configuration anew."""
        self._send("READY=1", self._said(status))

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", self._said(status))

    def status(self, status: str) -> None:
        """One line about how it goes; sent where it is another than before."""
        if status != self._status:
            self._send(self._said(status))

    def progressed(self, until_ns: int) -> None:
        """Feed the watchdog, if there is one and it is time, and if work has got further than when it was fed last.

        until_ns: what happened before it is done; whoever goes round in circles gives the same again.
        """
        now = time.monotonic()
        if self._watchdog_s is None or now - self._fed_at < self._watchdog_s or until_ns <= self._progress_ns:
            return
        if self._send("WATCHDOG=1"):
            self._fed_at, self._progress_ns = now, until_ns

    def _said(self, status: str) -> str:
        self._status = status
        line = " ".join(status.split())[:MAX_STATUS_CHARS]
        return f"STATUS={line}"

    def _send(self, *lines: str) -> bool:
        """Whether it was taken. A manager with a full queue is not waited for."""
        if self._socket is None:
            return False
        with suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(errors="replace"), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
            return True
        return False
