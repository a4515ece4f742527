"""Request records as JSON lines: one object a line, strict JSON, readable as it grows.

In come `RequestRecord`s, out goes text, all of a tick at once and flushed, so that a reader behind a pipe sees whole lines in
time. What a record says is left to `RequestRecord.as_dict`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from gputail.errors import GputailError

if TYPE_CHECKING:
    from gputail.tail import RequestRecord

MAX_WAITING = 100_000  # records that wait for a slow reader


def line(record: Mapping[str, Any]) -> str:
    """One record as JSON on one line, ASCII. What JSON has no word for (NaN, infinity) is null: not known."""
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's."""
    if hasattr(value, "item"):
        return _finite(value.item())
    raise TypeError(f"{type(value).__name__} in a request record")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


class JsonlWriter:
    """Writes records to a file, or to stdout where the path is "-".

    append: add to an existing file (a daemon that was restarted) instead of replacing it. Raises GputailError where the
    file cannot be written; BrokenPipeError where the reader of a pipe has gone, which is no error of ours.
    """

    def __init__(self, path: str, append: bool = False) -> None:
        self.path = path
        try:
            self._file: TextIO = sys.stdout if path == "-" else open(path, "a" if append else "w", encoding="ascii")
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, records: Iterable[RequestRecord]) -> None:
        text = "".join(line(record.as_dict()) + "\n" for record in records)
        if not text:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.abandon()
            raise self._cannot_write(error) from error

    def close(self) -> None:
        if self.path == "-" or self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot_write(error) from error

    def abandon(self) -> None:
        """Python keeps what it could not write and tries again at close and at exit: let that go nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)

    def _cannot_write(self, error: OSError) -> GputailError:
        where = "standard output" if self.path == "-" else self.path
        return GputailError(f"cannot write request records to {where}: {(error.strerror or str(error)).lower()}")


class BackgroundWriter:
    """A JsonlWriter on a thread of its own, for a caller that must not wait: a pipe that nobody reads takes nothing more.

    What waits is bounded; records beyond are lost and counted. What the writer raises is raised by the next call here.
    """

    def __init__(self, writer: JsonlWriter, max_records: int = MAX_WAITING) -> None:
        self.lost = 0
        self._writer = writer
        self._max_records = max_records
        self._taken = self._written = 0  # records; each counted by one thread only
        self._queue: queue.SimpleQueue[tuple[RequestRecord, ...] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jsonl", daemon=True)
        self._thread.start()

    def write(self, records: Iterable[RequestRecord]) -> None:
        self._raise()
        some = tuple(records)
        room = self._max_records - (self._taken - self._written)
        if len(some) > room:
            self.lost += len(some) - max(room, 0)
            some = some[: max(room, 0)]
        if some:
            self._taken += len(some)
            self._queue.put(some)

    def close(self, within_s: float = 2.0) -> bool:
        """Write what waits, if that goes within the time; whether it did. If not, the thread hangs in a write."""
        self._queue.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        self._raise()
        self._writer.close()
        return True

    def _run(self) -> None:
        try:
            while (some := self._queue.get()) is not None:
                self._writer.write(some)
                self._written += len(some)
        except BaseException as error:
            self._failure = error

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
