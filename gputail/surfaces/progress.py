"""A line on stderr that says how far something has come, once it has taken long enough for a person to wonder.

In go shares of the work done, out goes one line that overwrites itself and is gone at the end. Nothing is written where
stderr is no terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
EVERY_S = 0.25
BAR_CHARS = 20


class Progress:
    """what: the work in a few words, in printable characters. clock: seconds, for tests."""

    def __init__(self, what: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._stream, self._clock = what, stream or sys.stderr, clock
        self._next_s = clock() + QUIET_S
        self._is_terminal = self._stream.isatty()
        self._shown = False

    def __call__(self, share: float) -> None:
        """So much (0 to 1) is done."""
        if not self._is_terminal or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + EVERY_S
        self._shown = True
        share = min(max(share, 0.0), 1.0)
        bar = "#" * round(BAR_CHARS * share)
        print(f"\r[{bar:{BAR_CHARS}}] {100 * share:3.0f}% {self._what}\x1b[K", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
