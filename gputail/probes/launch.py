"""Starting the command that is to be traced, held back until the probes are on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from gputail.errors import GputailError


class HeldCommand:
    """A child that waits before it executes the command, so that its first call is traced."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        gate_read, self._gate = os.pipe()
        self._failure, failure_write = os.pipe()  # both close on exec
        self.pid = os.fork()
        if self.pid == 0:
            self._become_command(gate_read, failure_write)
        os.close(gate_read)
        os.close(failure_write)
        self.status: int | None = None  # exit status once it has ended; 128 + signal if one ended it

    def _become_command(self, gate_read: int, failure_write: int) -> None:
        try:
            os.close(self._gate)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            if os.read(gate_read, 1) == b"g":
                os.execvp(self.command[0], self.command)
        except OSError as error:
            os.write(failure_write, str(error.strerror).encode())
        finally:
            os._exit(127)

    def start(self) -> None:
        """Let it go. GputailError when the command cannot be executed."""
        os.write(self._gate, b"g")
        os.close(self._gate)
        failure = os.read(self._failure, 200).decode(errors="replace")
        os.close(self._failure)
        if failure:
            os.waitpid(self.pid, 0)
            self.status = 127
            raise GputailError(f"cannot run {self.command[0]}: {failure}")

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        return self.status is not None

    def stop(self) -> None:
        """End it if it still runs, as ctrl-C would."""
        if not self.has_ended():
            os.kill(self.pid, signal.SIGTERM)
