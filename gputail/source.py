"""A file of calls as a stream of batches: a recording (.gpt) or a labelled trace (.npz), whatever its name is.

In goes a path, out come `events.Batch`es, as often as they are iterated over, and what the file says of itself. What the
two formats are like is left to capture.py and traces.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from gputail import events
from gputail.capture import CaptureReader
from gputail.errors import GputailError

ZIP = b"PK\x03\x04"  # how an .npz begins


class Source:
    """Iterate over its batches from the beginning; each time reads the file again ("-", stdin, can be read once).

    metadata: a recording's description of itself, known with the first batch; {} for a trace. damage: why reading ended
    early, or None. progress: is told the share (0 to 1) that has been read, where it can be known. Raises GputailError where
    the file cannot be read or is something else.
    """

    def __init__(self, path: str, progress: Callable[[float], None] | None = None) -> None:
        self.path = path
        self.metadata: Mapping[str, object] = {}
        self.damage: str | None = None
        self._progress = progress

    def __iter__(self) -> Iterator[events.Batch]:
        return self._trace() if self._is_zip() else self._recording()

    def _recording(self) -> Iterator[events.Batch]:
        with CaptureReader(self.path) as reader:
            self.metadata = reader.metadata
            for batch in reader:
                yield batch
                self._tell(reader.fraction)
            self.damage = reader.damage

    def _trace(self) -> Iterator[events.Batch]:
        from gputail import traces

        trace = traces.load(self.path)
        done = 0
        for batch in traces.batches(trace):
            yield batch
            done += len(batch.calls)
            self._tell(done / max(len(trace.calls), 1))

    def _tell(self, fraction: float | None) -> None:
        if self._progress and fraction is not None:
            self._progress(fraction)

    def _is_zip(self) -> bool:
        if self.path == "-":
            return False
        try:
            with open(self.path, "rb") as file:
                return file.read(len(ZIP)) == ZIP
        except OSError as error:
            raise GputailError(f"cannot read {self.path}: {(error.strerror or str(error)).lower()}") from error
