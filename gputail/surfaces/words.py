"""Figures and names as people read them: durations, counts, sizes, names of other processes.

In come numbers and text, out comes short text of bounded length. Imports little, so that what only shows things starts at once.
"""

from __future__ import annotations

import time

MAX_NAME = 38

_UNITS = ((1, "ns"), (1_000, "us"), (1_000_000, "ms"), (1_000_000_000, "s"))


def duration(ns: float | None) -> str:
    """A time in three digits and the unit that suits it, as in 12.5 ms; "-" where it is not known."""
    if ns is None:
        return "-"
    if ns < 0:
        return "-" + duration(-ns)
    size, unit = next((size, unit) for size, unit in _UNITS if ns < 999.5 * size or unit == "s")
    value = ns / size
    digits = 0 if unit == "ns" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def clean(text: str | None, width: int = MAX_NAME) -> str:
    """Text of another process, fit to print: no control characters, no more than `width` characters."""
    if text is None:
        return "?"
    shown = "".join(char if char.isprintable() else "?" for char in text[: 4 * width])
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def number(value: float | None) -> str:
    """A count or a rate in about three digits, as in 0.4, 21, 12.3k; "-" where it is not known."""
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def size(value_bytes: int | None) -> str:
    """A size in bytes, as in 84 MB."""
    return "-" if value_bytes is None else f"{number(value_bytes)}B".replace("kB", " kB").replace("MB", " MB").replace("GB", " GB")


_offset_ns = time.time_ns() - time.monotonic_ns()  # of the clock on the wall from CLOCK_MONOTONIC


def clock(monotonic_ns: int) -> str:
    """A time of CLOCK_MONOTONIC on the clock on the wall, to the millisecond; the same text each time, unless that clock was set."""
    global _offset_ns
    offset_ns = time.time_ns() - time.monotonic_ns()
    if abs(offset_ns - _offset_ns) > 100_000_000:
        _offset_ns = offset_ns
    wall_ns = monotonic_ns + _offset_ns
    return time.strftime("%H:%M:%S", time.localtime(wall_ns // 1_000_000_000)) + f".{wall_ns // 1_000_000 % 1000:03d}"


_INTERPRETERS = ("python", "pypy", "node", "ruby", "perl", "bash", "sh", "java")


def short_command(command: str | None, comm: str | None) -> str:
    """A process by the name people call it: the program without its folder, an interpreter with its script or module.

    "/usr/bin/python3 -u /srv/serve.py --port 80" is "python3 serve.py", "python -m vllm.serve" is "python vllm.serve". Without a command it
    is its comm, "?" where neither is known.
    """
    words = (command or "").split()
    if not words:
        return clean(comm) if comm else "?"
    program = words[0].rstrip(":").rpartition("/")[2] or words[0]
    if program.startswith(_INTERPRETERS):
        for place, word in enumerate(words[1:], 1):
            if word == "-m" and place + 1 < len(words):
                return clean(f"{program} {words[place + 1]}")
            if word == "-c":
                break
            if not word.startswith("-"):
                return clean(f"{program} {word.rpartition('/')[2] or word}")
    return clean(program)
