"""`gputail replay`: a recording, or a labelled trace, through the same stages as a live run.

In goes a file, out come a summary or request records. Imports no bcc: a recording can be replayed anywhere.
"""

from __future__ import annotations

import sys

from gputail.errors import GputailError
from gputail.source import Source


def run(path: str, jsonl: str | None) -> int:
    """Replay `path`: records to `jsonl` ("-" is stdout), or a summary to stdout where that is None. Returns the exit status."""
    from gputail.pipeline import Pipeline
    from gputail.surfaces.jsonl import JsonlWriter
    from gputail.surfaces.progress import Progress
    from gputail.surfaces.terminal import clean

    pipeline = Pipeline()
    with Progress(f"reading {clean(path)}") as progress:
        source = Source(path, progress if jsonl != "-" else None)  # records on a terminal would tear the line
        stream = iter(source)
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
    if source.damage:
        sys.stdout.flush()
        raise GputailError(source.damage, "what could be read was analysed")
    return 0
