"""Progress is for a person who waits at a terminal, and for nobody else."""

from __future__ import annotations

import io

from gputail.surfaces.progress import EVERY_S, QUIET_S, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, times: list[float]) -> str:
    clock = iter([0.0, *(time for time in times for _ in range(2))])
    with Progress("reading slow.gpt", stream, lambda: next(clock)) as progress:
        for number in range(len(times)):
            progress(number / len(times))
    return stream.getvalue()


def test_what_is_done_soon_shows_nothing() -> None:
    assert shown(Terminal(), [0.5, QUIET_S - 0.1]) == ""


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    assert shown(io.StringIO(), [10, 20]) == ""


def test_what_takes_long_shows_one_line_that_is_gone_at_the_end() -> None:
    clock = iter([0.0, QUIET_S, QUIET_S, QUIET_S + EVERY_S / 2, QUIET_S + EVERY_S, QUIET_S + EVERY_S])
    stream = Terminal()
    with Progress("reading slow.gpt", stream, lambda: next(clock)) as progress:
        progress(0.25)
        progress(0.3)  # too soon after
        progress(2.0)
    lines = stream.getvalue().split("\r")
    assert lines == [
        "",
        "[#####               ]  25% reading slow.gpt\x1b[K",
        "[####################] 100% reading slow.gpt\x1b[K",
        "\x1b[K",
    ]
