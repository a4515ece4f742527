"""`gputail completion`: a shell's completion of the command line, made from its parser.

In: the parser. Out: a script for bash, zsh or fish. Alone imports shtab.
"""

from __future__ import annotations

import argparse

import shtab

# Options whose values are files or pids, by the name of their metavar; the rest is completed with what the parser allows.
_FILES = frozenset({"FILE", "PATH", "OUT"})


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script to be sourced by `shell` ("bash", "zsh" or "fish")."""
    _mark_files(parser)
    text: str = shtab.complete(parser, shell)
    return text


def _mark_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _mark_files(verb)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
