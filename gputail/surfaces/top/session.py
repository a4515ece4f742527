"""A tracing session of top's own, for where no daemon runs: `gputail run` as a child that serves a private socket.

Out: the path of the socket, and what the child said when it could not trace. It ends with us, however we end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from gputail.errors import GputailError
from gputail.surfaces.client import Client, NoDaemon
from gputail.surfaces.progress import Progress

START_S = 60.0
LOOK_S = 6.0  # how long a single look traces before it is printed
END_S = 10.0
_PR_SET_PDEATHSIG = 1
# Our own code and no other, wherever it is installed: python would look for modules where we happen to be, too.
_RUN = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}; from gputail.cli import entry; entry()"


class Session:
    """Traces from entering it to leaving it."""

    def __enter__(self) -> Session:
        self._folder = tempfile.mkdtemp(prefix="gputail-top-")
        self.path = os.path.join(self._folder, "socket")
        self._log = os.path.join(self._folder, "log")
        libc = ctypes.CDLL(None)
        with open(self._log, "wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUN, "run", "--config", os.devnull, "--listen", "off", "--socket", self.path],
                cwd="/",
                # What a daemon of this machine is configured to do is not ours to do.
                env={name: value for name, value in os.environ.items() if not name.startswith("GPUTAIL_")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # ctrl-C is for us; we end it
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, and take its files away."""
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> None:
        """GputailError with what it said, if it has ended."""
        status = self._child.poll()
        if status is None:
            return
        with open(self._log, errors="replace") as log:
            lines = log.read(1 << 16).splitlines()
        problem = next((line for line in reversed(lines) if line.startswith("gputail: ")), f"gputail: tracing ended with status {status}")
        hint = next((line for line in reversed(lines) if line.startswith("hint: ")), "hint: see gputail check")
        raise GputailError(problem.removeprefix("gputail: "), hint.removeprefix("hint: "))

    def first_look(self) -> dict[str, Any]:
        """Trace for a while, and what was seen then."""
        began = time.monotonic()
        with Progress("tracing for one look, as no daemon runs") as progress:
            until = began + START_S
            while True:
                self.check()
                if time.monotonic() > until:
                    raise GputailError(f"tracing did not start within {START_S:.0f} s", "see gputail check")
                try:
                    client = Client(self.path)
                    break
                except NoDaemon:
                    time.sleep(0.05)
            with client:
                began = time.monotonic()
                while (passed := time.monotonic() - began) < LOOK_S:
                    self.check()
                    progress(passed / LOOK_S)
                    time.sleep(0.1)
                return client.ask(get="snapshot")
