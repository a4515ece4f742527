"""Drive the `caller` program: exactly these calls, in this process and thread, now.

For tests that compare what was seen with what was made. `Caller.do` sends one command of programs/loaders/caller.c and gives
its answer; nothing happens between commands.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gputail.sim.build import build


class Caller:
    """A running caller. `load`: whether it opens libcuda at once, or only at the command `load`.

    program: a copy of it, under another name; prefix: a command that runs it, keeping its pid.
    """

    def __init__(
        self, gpu: Path, load: bool = True, libraries: Path | None = None, program: Path | None = None, prefix: Sequence[str] = ()
    ) -> None:
        built = build()
        environment = {**os.environ, "GPUTAIL_SIM_GPU": str(gpu), "LD_LIBRARY_PATH": str(libraries or built.libraries)}
        self.process = subprocess.Popen(
            [*prefix, str(program or built.programs["caller"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.pid = self.process.pid
        self._answer()
        if load:
            self.do("load")

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the caller ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def send(self, *words: object) -> None:
        """Send a command and do not wait for its answer, which `receive` gives."""
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")

    def receive(self) -> dict[str, Any]:
        return self._answer()

    def do(self, *words: object) -> dict[str, Any]:
        """Send a command and wait for its answer; ValueError when the caller cannot carry it out."""
        self.send(*words)
        return self._answer()

    def get(self, name: str) -> int:
        """A variable's value: what a call gave through &name."""
        value: int = self.do("get", name)["value"]
        return value

    def start_gpu(self) -> None:
        """Initialize the driver and make the primary context, $context, current: three calls."""
        self.do("call", "cuInit", 1, 0)
        self.do("call", "cuDevicePrimaryCtxRetain", 1, "&context", 0)
        self.do("call", "cuCtxSetCurrent", 1, "$context")

    def kernel(self, name: str, variable: str = "f") -> int:
        """A CUfunction of that name, left in $variable too: a lookup, and a module load before the first."""
        if not self.get("module"):
            self.do("call", "cuModuleLoadData", 1, "&module", "'an-image")
        self.do("call", "cuModuleGetFunction", 1, f"&{variable}", "$module", f"'{name}")
        return self.get(variable)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin and self.process.stdout
            self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.process.stdout.close()
        self.process.wait()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
