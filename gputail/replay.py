"""`gputail replay`: a recording, or a labelled trace, through the same stages as a live run.

In goes a file, out come a summary or request records. Imports no bcc: a recording can be replayed anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from gputail import events
from gputail.capture import CaptureReader
from gputail.errors import GputailError

ZIP = b"PK\x03\x04"  # how an .npz begins, whatever its name


def batches(path: str, damage: list[str]) -> Iterator[events.Batch]:
    """The batches of a recording or an .npz trace; why reading ended early, if it did, is added to `damage`."""
    if _is_zip(path):
        from gputail import traces

        yield from traces.batches(traces.load(path))
        return
    with CaptureReader(path) as reader:
        yield from reader
        if reader.damage:
            damage.append(reader.damage)


def _is_zip(path: str) -> bool:
    if path == "-":
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(ZIP)) == ZIP
    except OSError as error:
        raise GputailError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def run(path: str, jsonl: str | None) -> int:
    """Replay `path`: records to `jsonl` ("-" is stdout), or a summary to stdout where that is None. Returns the exit status."""
    from gputail.pipeline import Pipeline
    from gputail.surfaces.jsonl import JsonlWriter

    damage: list[str] = []
    pipeline = Pipeline()
    stream = batches(path, damage)
    batch = next(stream, None)  # before the output is opened: a file that cannot be read must not cost one that exists
    writer = JsonlWriter(jsonl) if jsonl is not None else None

    def hand_on() -> None:
        records = pipeline.take_records()
        if writer:
            writer.write(records)

    while batch is not None:
        pipeline.feed(batch)
        hand_on()
        batch = next(stream, None)
    pipeline.finish()
    hand_on()
    if writer:
        writer.close()
    else:
        from gputail.surfaces import terminal

        sys.stdout.write(terminal.summary(pipeline.snapshot()))
    if damage:
        sys.stdout.flush()
        raise GputailError(damage[0], "what could be read was analysed")
    return 0
