"""Recordings: the batches of a run in a file, to be replayed exactly as they came.

In go batches, out come the same rows, names, news of processes, losses and watermarks. A file is a signature, then
blocks, each with its length and checksum; the first describes the rows and numbers the functions, so that the file
explains itself. Blocks are only ever appended, each in one go, so whatever ends a recording (a crash, kill -9, a full disk) costs
at most the block being written. What the rows mean is left to others.

layout, little-endian:
  file      SIGNATURE (12 bytes), version u16, 0 u16, then blocks
  block     kind u8, codec u8 (0 as is, 1 zlib), 0 u16, stored bytes u32, raw bytes u32, crc32 u32 of the 12 bytes
            before it and the stored bytes; then the stored bytes
  META      JSON object, the first block
  BATCH     watermark_ns u64, calls u32, names u32, news bytes u32; CALL rows, transposed: byte 0 of every row, byte 1 of
            every row, ...; NAME rows; JSON [[[process fields], ...], {stage: lost}]
  END       JSON object of totals, the last block of a recording that was closed
Transposed, neighbouring bytes are alike: zlib's fastest level then makes rows 13 times smaller, at 5 million rows a second.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import stat
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields
from types import TracebackType
from typing import BinaryIO

import numpy as np

from gputail import __version__, events
from gputail.errors import GputailError
from gputail.probes import table

SIGNATURE = b"\x8bGPUTAIL\r\n\x1a\n"
VERSION = 1
META, BATCH, END = 1, 2, 3
_FILE_HEAD = struct.Struct("<12sHH")
_BLOCK_HEAD = struct.Struct("<BBHII")
_CRC = struct.Struct("<I")
_BATCH_HEAD = struct.Struct("<QIII")

# A batch of more than this is written as several blocks, and a block that claims more is damaged.
MAX_CALLS = 1 << 17
MAX_NAMES = 1 << 13
MAX_PROCESSES = 1 << 5
MAX_TEXT = 1 << 13  # of one process field
MAX_GPUS = 64  # of one process
MAX_RAW_BYTES = 48 << 20
_MIN_TO_COMPRESS = 256

_PROCESS_FIELDS = len(fields(events.Process))
_OLDEST_PROCESS_FIELDS = 6  # of the first recordings; what they lack is not known


def _metadata(facts: Mapping[str, object]) -> dict[str, object]:
    return {
        "program": f"gputail {__version__}",
        "clock": "CLOCK_MONOTONIC",
        "started_monotonic_ns": time.monotonic_ns(),
        "started_unix_ns": time.time_ns(),
        "node": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "functions": {str(number): function.name for number, function in table.BY_NUMBER.items()},
        "call_row": _describe(events.CALL),
        "name_row": _describe(events.NAME),
        **facts,
    }


def _describe(dtype: np.dtype) -> list[list[str]]:
    return [[name, dtype[name].str] for name in dtype.names or ()]


def _pack(kind: int, raw: bytes) -> bytes:
    """One block, ready to be appended."""
    codec, stored = 0, raw
    if len(raw) >= _MIN_TO_COMPRESS:
        squeezed = zlib.compress(raw, 1)
        if len(squeezed) < len(raw):
            codec, stored = 1, squeezed
    head = _BLOCK_HEAD.pack(kind, codec, 0, len(stored), len(raw))
    return head + _CRC.pack(zlib.crc32(stored, zlib.crc32(head))) + stored


def _pack_batch(batch: events.Batch) -> bytes:
    calls = np.ascontiguousarray(batch.calls, events.CALL)
    transposed = np.ascontiguousarray(calls.view(np.uint8).reshape(len(calls), events.CALL.itemsize).T)
    news = b""
    if batch.processes or batch.lost:
        processes = [[_bounded(value) for value in astuple(process)] for process in batch.processes]
        news = json.dumps([processes, {stage: int(lost) for stage, lost in batch.lost.items()}], separators=(",", ":")).encode()
    head = _BATCH_HEAD.pack(batch.watermark_ns, len(calls), len(batch.names), len(news))
    return _pack(BATCH, b"".join((head, transposed.tobytes(), np.ascontiguousarray(batch.names, events.NAME).tobytes(), news)))


def _bounded(value: object) -> object:
    if isinstance(value, tuple):
        return [text[:MAX_TEXT] for text in value[:MAX_GPUS]]
    return value[:MAX_TEXT] if isinstance(value, str) else value


def _split(batch: events.Batch, watermark_ns: int) -> Iterator[events.Batch]:
    """The batch in parts that fit a block; all but the last promise no more than `watermark_ns`, the one before."""
    parts = max(
        1,
        -(-len(batch.calls) // MAX_CALLS),
        -(-len(batch.names) // MAX_NAMES),
        -(-len(batch.processes) // MAX_PROCESSES),
    )
    for part in range(parts):
        yield events.Batch(
            calls=batch.calls[part * MAX_CALLS : (part + 1) * MAX_CALLS],
            names=batch.names[part * MAX_NAMES : (part + 1) * MAX_NAMES],
            processes=batch.processes[part * MAX_PROCESSES : (part + 1) * MAX_PROCESSES],
            lost=batch.lost if part == 0 else {},
            watermark_ns=batch.watermark_ns if part == parts - 1 else watermark_ns,
        )


class CaptureWriter:
    """Writes a recording. An existing file is replaced the moment the writer is made, so make it once tracing works.

    path: a file, or "-" for stdout. facts: what to note in the recording's description besides the host's own facts.
    Every method raises GputailError when the file cannot be written; what was written before then stays readable.
    """

    def __init__(self, path: str, facts: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.events = 0
        self.size_bytes = 0
        self._watermark_ns = 0
        self._failed = False
        self._file = _open_for_writing(path)
        self._append(_FILE_HEAD.pack(SIGNATURE, VERSION, 0) + _pack(META, json.dumps(_metadata(facts or {})).encode()))

    def write(self, batch: events.Batch) -> None:
        """Append a batch; it is with the operating system when this returns."""
        for part in _split(batch, self._watermark_ns):
            self._append(_pack_batch(part))
            self.events += len(part.calls)
        self._watermark_ns = batch.watermark_ns

    def close(self) -> None:
        """End the recording. Nothing is added to one that has failed."""
        if self._file < 0:
            return
        try:
            if not self._failed:
                self._append(_pack(END, json.dumps({"events": self.events}).encode()))
        finally:
            if self.path != "-":
                os.close(self._file)
            self._file = -1

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _append(self, block: bytes) -> None:
        if self._failed:
            raise GputailError(f"cannot write to {self.path}: an earlier write failed")
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BrokenPipeError:
            self._failed = True
            raise
        except OSError as error:
            self._failed = True
            self._cut_off_partial_block()
            raise GputailError(
                f"cannot write to {self.path}: {_reason(error)}; recording stopped after {self.events} events",
                f"what was written before remains readable: gputail replay {self.path}" if self.events else "",
            ) from error
        self.size_bytes += len(block)

    def _cut_off_partial_block(self) -> None:
        try:
            os.ftruncate(self._file, self.size_bytes)
        except OSError:
            pass  # a pipe or a device; a reader stops at the partial block by itself


def _open_for_writing(path: str) -> int:
    if path == "-":
        if sys.stdout.isatty():
            raise GputailError("a recording is not text: not written to a terminal", "redirect stdout, or give -o a file name")
        sys.stdout.flush()
        return sys.stdout.fileno()
    try:
        # Not to hang in open on a FIFO that nobody reads, O_NONBLOCK; 0600 since it holds the command lines of others.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise GputailError(f"cannot write to {path}: it is a FIFO or a socket", "use -o - and a pipe") from error
        raise GputailError(f"cannot write to {path}: {_reason(error)}") from error
    mode = os.fstat(file).st_mode
    try:
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise GputailError(f"cannot write to {path}: it is no regular file", "use -o - and a pipe")
        if stat.S_ISREG(mode):
            os.ftruncate(file, 0)
    except BaseException:
        os.close(file)
        raise
    return file


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


class _Damage(Exception):
    """A block that is not whole, or not ours."""


class CaptureReader:
    """Reads a recording: iterate over its batches, then look at `damage`.

    path: a file, or "-" for stdin. metadata: the recording's description of itself. damage: None, or why reading stopped
    before the end; all that came before it has been handed out. Raises GputailError at once where the file cannot be read
    or is something else. The file is not trusted: sizes are bounded, and nothing in it is executed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.damage: str | None = None
        self._blocks = 0
        try:
            self._file: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb")
        except OSError as error:
            raise GputailError(f"cannot read {path}: {_reason(error)}") from error
        try:
            self.metadata = self._read_description()
        except BaseException:
            self.close()
            raise

    @property
    def fraction(self) -> float | None:
        """The share (0 to 1) of the file that has been read; None where its size is not known, as that of a pipe."""
        try:
            return self._file.tell() / os.fstat(self._file.fileno()).st_size
        except (OSError, ZeroDivisionError):
            return None

    def close(self) -> None:
        if self.path != "-":
            self._file.close()

    def __enter__(self) -> CaptureReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[events.Batch]:
        """The batches in order, once; `damage` is known when they are all taken."""
        try:
            while (block := self._read_block()) is not None:
                kind, raw = block
                if kind == END:
                    return
                if kind != BATCH:
                    raise _Damage(f"is of unknown kind {kind}")
                yield _unpack_batch(raw)
            self.damage = f"{self.path} ends after block {self._blocks} without having been closed: the recording was cut off"
        except _Damage as damage:
            self.damage = f"block {self._blocks + 1} of {self.path} {damage}; what came before it was read"

    def _read_description(self) -> dict[str, object]:
        expected = "expected is a file written by gputail record, or a .npz trace"
        head = self._read(_FILE_HEAD.size)
        if not head:
            raise GputailError(f"{self.path} is empty", expected)
        if len(head) < _FILE_HEAD.size or not head.startswith(SIGNATURE):
            raise GputailError(f"{self.path} is not a recording of gputail", expected)
        version = _FILE_HEAD.unpack(head)[1]
        if version != VERSION:
            raise GputailError(
                f"{self.path} is a recording of format {version}, and this is gputail {__version__}, which reads format {VERSION}",
                "replay it with the version of gputail that recorded it",
            )
        try:
            block = self._read_block()
            if block is None or block[0] != META:
                raise _Damage("does not describe the recording")
            metadata = _json(block[1])
            if not isinstance(metadata, dict):
                raise _Damage("does not describe the recording")
        except _Damage as damage:
            raise GputailError(f"{self.path} is damaged: its first block {damage}", "nothing in it can be read") from damage
        self._check_rows(metadata)
        return metadata

    def _check_rows(self, metadata: Mapping[str, object]) -> None:
        """A recording is only readable where rows and function numbers mean what they mean here."""
        functions = metadata.get("functions")
        ours = {str(number): function.name for number, function in table.BY_NUMBER.items()}
        same_rows = (metadata.get("call_row"), metadata.get("name_row")) == (_describe(events.CALL), _describe(events.NAME))
        if not same_rows or not isinstance(functions, dict) or any(ours.get(number) != name for number, name in functions.items()):
            raise GputailError(
                f"{self.path} was recorded by {str(metadata.get('program', 'another program'))[:80]!r}, whose rows gputail {__version__} "
                "does not know",
                "replay it with the version of gputail that recorded it",
            )

    def _read_block(self) -> tuple[int, bytes] | None:
        """Kind and raw content of the next block, or None at the end of the file."""
        head = self._read(_BLOCK_HEAD.size + _CRC.size)
        if not head:
            return None
        if len(head) < _BLOCK_HEAD.size + _CRC.size:
            raise _Damage("is cut off")
        kind, codec, _, stored_bytes, raw_bytes = _BLOCK_HEAD.unpack_from(head)
        if codec > 1 or raw_bytes > MAX_RAW_BYTES or stored_bytes > raw_bytes or (codec == 0 and stored_bytes != raw_bytes):
            raise _Damage("is damaged: its header makes no sense")
        stored = self._read(stored_bytes)
        if len(stored) < stored_bytes:
            raise _Damage("is cut off")
        if zlib.crc32(stored, zlib.crc32(head[: _BLOCK_HEAD.size])) != _CRC.unpack_from(head, _BLOCK_HEAD.size)[0]:
            raise _Damage("is damaged: its checksum is wrong")
        raw = stored
        if codec == 1:
            inflate = zlib.decompressobj()
            try:
                raw = inflate.decompress(stored, raw_bytes)
            except zlib.error as error:
                raise _Damage("is damaged: it cannot be decompressed") from error
        if len(raw) != raw_bytes:
            raise _Damage("is damaged: it has another size than it says")
        self._blocks += 1
        return kind, raw

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise GputailError(f"cannot read {self.path}: {_reason(error)}") from error


def _unpack_batch(raw: bytes) -> events.Batch:
    if len(raw) < _BATCH_HEAD.size:
        raise _Damage("is damaged: it is too short for a batch")
    watermark_ns, n_calls, n_names, n_news = _BATCH_HEAD.unpack_from(raw)
    names_at = _BATCH_HEAD.size + n_calls * events.CALL.itemsize
    news_at = names_at + n_names * events.NAME.itemsize
    if news_at + n_news != len(raw):
        raise _Damage("is damaged: its counts do not fit its size")
    transposed = np.frombuffer(raw, np.uint8, n_calls * events.CALL.itemsize, _BATCH_HEAD.size)
    calls = np.ascontiguousarray(transposed.reshape(events.CALL.itemsize, n_calls).T).view(events.CALL).reshape(n_calls)
    names = np.frombuffer(raw, events.NAME, n_names, names_at)
    processes, lost = _news(raw[news_at:])
    return events.Batch(calls=calls, names=names, processes=processes, lost=lost, watermark_ns=watermark_ns)


def _news(text: bytes) -> tuple[tuple[events.Process, ...], dict[str, int]]:
    if not text:
        return (), {}
    news = _json(text)
    if not isinstance(news, list) or len(news) != 2 or not isinstance(news[0], list) or not isinstance(news[1], dict):
        raise _Damage("is damaged: its news of processes make no sense")
    if not all(type(count) is int and count >= 0 for count in news[1].values()):
        raise _Damage("is damaged: its counts of what was lost make no sense")
    return tuple(_process(row) for row in news[0]), news[1]


def _process(row: object) -> events.Process:
    if isinstance(row, list) and _OLDEST_PROCESS_FIELDS <= len(row) <= _PROCESS_FIELDS:
        tgid, comm, command, cgroup, container, start_ns, gpus = row + [None] * (_PROCESS_FIELDS - len(row))
        texts = (comm, command, cgroup, container)
        are_texts = all(isinstance(text, (str, type(None))) for text in texts)
        are_gpus = gpus is None or (isinstance(gpus, list) and len(gpus) <= MAX_GPUS and all(isinstance(gpu, str) for gpu in gpus))
        if type(tgid) is int and type(start_ns) in (int, type(None)) and are_texts and are_gpus:
            return events.Process(tgid, comm, command, cgroup, container, start_ns, None if gpus is None else tuple(gpus))
    raise _Damage("is damaged: its news of processes make no sense")


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Damage("is damaged: it holds no JSON") from error
