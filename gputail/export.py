"""`gputail export`: the requests and verdicts of recordings as Parquet, for whatever engine asks questions of many nodes.

In go recordings, out two tables, each partitioned by node and hour: `requests`, a row for each, and `contributions`, a row for each
cause of each outlier. docs/scale.md has their columns; gputail/queries has questions that run on them in DuckDB and in Spark.
Exporting a recording again replaces what it gave before. Files appear whole or not at all. Imports no bcc.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputail.budget import PARTS
from gputail.discovery.sanitize import printable
from gputail.errors import GputailError
from gputail.events import Process
from gputail.source import Source
from gputail.tail import RequestRecord

if TYPE_CHECKING:
    import pyarrow

# Rows of a file that are held in memory; they become one row group.
ROW_GROUP = 65536
MAX_PROCESSES = 4096
_NS = 1_000_000_000

_COMMON = (
    ("time", "time"), ("pid", "int64"), ("tid", "int64"), ("comm", "string"), ("command", "string"), ("container", "string"),
    ("workload", "string"), ("duration_ns", "int64"), ("baseline_ns", "int64"), ("excess_ns", "int64"),
)  # fmt: skip
TABLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "requests": (
        *_COMMON, ("boundary", "string"), ("calls", "int64"), ("launches", "int64"), ("tier", "string"), ("incomplete", "bool"),
        ("outlier", "bool"), ("cause", "string"), ("confidence", "double"), *((f"{part}_ns", "int64") for part in PARTS),
    ),
    "contributions": (
        *_COMMON, ("cause", "string"), ("cause_ns", "int64"), ("culprit_pid", "int64"), ("culprit", "string"), ("culprit_comm", "string"),
    ),
}  # fmt: skip


def queries() -> dict[str, str]:
    """The questions that are shipped, by name: SQL over the tables `requests` and `contributions`."""
    folder = Path(__file__).parent / "queries"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.sql"))}


def run(paths: Sequence[str], folder: str, node: str | None) -> int:
    """Export the recordings at `paths` below `folder`; node: what to call the node instead of what they say. Returns the exit status."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise GputailError("pyarrow is needed to write Parquet", "pip install 'gputail[parquet]'") from error
    from gputail.surfaces.progress import Progress
    from gputail.surfaces.terminal import clean

    damage = []
    for path in paths:
        with Progress(f"exporting {clean(path)}") as progress:
            source = Source(path, progress)
            requests, outliers = _export(source, Path(folder), node)
        print(f"{clean(path)}: {requests} requests, {outliers} outliers", file=sys.stderr)
        if source.damage:
            damage.append(source.damage)
    if damage:
        raise GputailError("; ".join(damage), "what could be read was exported")
    return 0


@dataclass(frozen=True)
class _Origin:
    """Where and when a recording was made. unix_ns: what to add to its times."""

    node: str
    name: str
    unix_ns: int


def _origin(source: Source, node: str | None) -> _Origin:
    told = [source.metadata.get(key) for key in ("started_unix_ns", "started_monotonic_ns", "node")]
    unix, monotonic = (value if isinstance(value, int) and 0 <= value < 1 << 63 else None for value in told[:2])
    if unix is None or monotonic is None:
        raise GputailError(f"{source.path} does not say when it was made", "a labelled trace cannot be exported, a recording can")
    name = node if node is not None else printable(str(told[2] or ""), 253)
    if not name or name.startswith(".") or not set(name) <= set(_IN_A_NODE):
        raise GputailError(f"{source.path} was made on a node whose name cannot be that of a folder", "give it one with --node")
    return _Origin(name, str(unix), unix - monotonic)


_IN_A_NODE = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"


def _export(source: Source, folder: Path, node: str | None) -> tuple[int, int]:
    from gputail.pipeline import Pipeline

    pipeline, processes = Pipeline(), _Processes()
    requests = outliers = 0
    writers: _Writers | None = None
    with contextlib.ExitStack() as stack:
        for batch in source:
            if writers is None:
                writers = stack.enter_context(_Writers(folder, _origin(source, node)))
            processes.learn(batch.processes)
            pipeline.feed(batch)
            for record in pipeline.take_records():
                writers.add(record, processes)
        pipeline.finish()
        for record in pipeline.take_records():
            assert writers is not None  # no records without a batch
            writers.add(record, processes)
        if writers is None:
            raise GputailError(f"{source.path} holds no batch of calls")
        requests, outliers = writers.requests, writers.outliers
        writers.publish()
    return requests, outliers


class _Processes:
    """What recordings say of processes, the latest of them."""

    def __init__(self) -> None:
        self._known: dict[int, Process] = {}

    def learn(self, news: Sequence[Process]) -> None:
        for process in news:
            self._known.pop(process.tgid, None)
            self._known[process.tgid] = process
            if len(self._known) > MAX_PROCESSES:
                del self._known[next(iter(self._known))]

    def get(self, tgid: int | None) -> Process:
        return self._known.get(tgid or 0) or Process(tgid or 0)


class _Writers:
    """The files of one recording, under other names until all is written."""

    def __init__(self, folder: Path, origin: _Origin) -> None:
        self._folder, self._origin = folder, origin
        self._open: dict[tuple[str, str], _File] = {}
        self._done: list[_File] = []
        self.requests = self.outliers = 0

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._open.values(), *self._done):
            file.discard()

    def add(self, record: RequestRecord, processes: _Processes) -> None:
        self.requests += 1
        self.outliers += record.outlier
        time_ns = record.end_ns + self._origin.unix_ns
        hour = datetime.fromtimestamp(time_ns // _NS, timezone.utc).strftime("%Y-%m-%d-%H")
        process = processes.get(record.pid)
        common = (
            time_ns // 1000, record.pid, record.tid, record.comm, process.command, process.container, record.workload,
            record.duration_ns, record.baseline_ns, record.excess_ns,
        )  # fmt: skip
        self._file("requests", hour).add(
            (
                *common, record.boundary, record.calls, record.launches, record.tier, record.incomplete, record.outlier, record.cause,
                record.confidence, *record.budget_ns,
            )
        )  # fmt: skip
        for of in record.contributions:
            culprit = processes.get(of.culprit_pid).comm if of.culprit_pid else None
            self._file("contributions", hour).add((*common, of.cause, of.ns, of.culprit_pid, of.culprit, culprit))

    def _file(self, table: str, hour: str) -> _File:
        file = self._open.get((table, hour))
        if file is None:
            # Records come in order of their end: hours before the last are over.
            for key in [key for key in self._open if key[0] == table and key[1] < hour]:
                self._done.append(self._open.pop(key))
                self._done[-1].close()
            place = self._folder / table / f"node={self._origin.node}" / f"hour={hour}" / f"{self._origin.name}.parquet"
            file = self._open[table, hour] = _File(place, TABLES[table])
        return file

    def publish(self) -> None:
        files = [*self._open.values(), *self._done]
        for file in files:
            file.close()
        for file in files:
            file.publish()


class _File:
    """One Parquet file. Raises GputailError where it cannot be written."""

    def __init__(self, place: Path, columns: tuple[tuple[str, str], ...]) -> None:
        from pyarrow.parquet import ParquetWriter

        self._place, self._columns, self._rows = place, columns, list[tuple[Any, ...]]()
        self._partial = place.with_name(f".{place.name}.partial")  # engines pass over names that begin so
        self._schema = _schema(columns)
        with self._may_fail():
            place.parent.mkdir(parents=True, exist_ok=True)
            self._writer: ParquetWriter | None = ParquetWriter(self._partial, self._schema, compression="zstd")

    def add(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if self._rows and self._writer:
            columns = [pyarrow.array(column, field.type) for column, field in zip(zip(*self._rows, strict=True), self._schema, strict=True)]
            with self._may_fail():
                self._writer.write_batch(pyarrow.record_batch(columns, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        writer, self._writer = self._writer, None
        if writer:
            with self._may_fail():
                writer.close()

    def publish(self) -> None:
        with self._may_fail():
            os.replace(self._partial, self._place)

    def discard(self) -> None:
        """Leave nothing unfinished behind."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):
            if writer:
                writer.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _may_fail(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GputailError(f"cannot write {self._place}: {(error.strerror or str(error)).lower()}") from error


def _schema(columns: tuple[tuple[str, str], ...]) -> pyarrow.Schema:
    import pyarrow

    types = {
        # Spark reads no nanoseconds.
        "time": pyarrow.timestamp("us", tz="UTC"),
        "int64": pyarrow.int64(), "string": pyarrow.string(), "bool": pyarrow.bool_(), "double": pyarrow.float64(),
    }  # fmt: skip
    return pyarrow.schema([(name, types[kind]) for name, kind in columns])
