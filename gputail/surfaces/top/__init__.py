"""`gputail top`: the workloads of the node, live.

In comes the path of a daemon's control socket, out goes a screen, or one view of it as text or JSON. Without a daemon it traces by
itself (session.py). Only app.py and lines.py know textual; what is shown where is worked out by pure functions on messages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gputail.errors import GputailError
from gputail.surfaces.client import Client, NoDaemon
from gputail.surfaces.top.session import Session

# Terminals that cannot place text, and those without block characters.
_DUMB = ("", "dumb", "unknown")
_ASCII_ONLY = ("linux", "vt", "ansi", "cons")


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    socket: str
    once: bool = False
    json: bool = False
    ascii: bool = False
    delay_s: float = 1.0
    filter: str = ""
    sort: str = "outliers"


def run(options: Options) -> int:
    """Show it, until told to end; the exit status. GputailError where there is nothing to attach to and no way to trace."""
    plain = options.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    if not plain and not options.json and os.environ.get("TERM", "") in _DUMB:
        print(f"gputail: no live view on a terminal of type {os.environ.get('TERM', '')!r}; one view follows", file=sys.stderr)
        plain = True
    with _source(options.socket) as source:
        if options.json or plain:
            return _print(options, source)
        return _live(options, source)


@contextmanager
def _source(path: str) -> Iterator[Session | str]:
    """The path of a daemon's socket that can be opened, or a session of our own."""
    try:
        Client(path).close()
    except NoDaemon as missing:
        if os.geteuid() != 0:
            raise GputailError(f"{missing.problem}, and to trace by itself top needs root", "run as root: sudo gputail top") from missing
        with Session() as session:
            yield session
    else:
        yield path


def _print(options: Options, source: Session | str) -> int:
    from gputail.surfaces.top import once

    message = source.first_look() if isinstance(source, Session) else _ask(source)
    text = json.dumps(message) + "\n" if options.json else once.page(message, options.filter, options.sort, is_ascii(options))
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _ask(path: str) -> dict:
    with Client(path) as client:
        return client.ask(get="snapshot")


def _live(options: Options, source: Session | str) -> int:
    from gputail.surfaces.top.screen import run as show

    return show(options, source, is_ascii(options))


def is_ascii(options: Options) -> bool:
    """Whether to draw with ASCII alone: asked for, or the locale or the terminal has nothing else."""
    if options.ascii:
        return True
    # Not what Python says: it takes UTF-8 for the C locale.
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    is_utf8 = "utf8" in locale.lower().replace("-", "")
    return not is_utf8 or os.environ.get("TERM", "").startswith(_ASCII_ONLY)
