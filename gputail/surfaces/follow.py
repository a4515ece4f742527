"""`gputail events`: the verdicts of a running daemon as they come, a line each.

In come the messages of the control socket, out go lines of text or of JSON. The daemon may go away and come back meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gputail.surfaces.client import Client, NoDaemon
from gputail.surfaces.words import clean, clock

RETRY_S = 1.0


@dataclass(frozen=True)
class Filter:
    """Which verdicts are shown: all that each field given agrees with."""

    causes: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    workload: str = ""  # a part of its name
    min_ms: float = 0.0  # of excess

    def wants(self, record: dict[str, Any]) -> bool:
        return (
            (not self.causes or record["cause"] in self.causes)
            and (not self.pids or record["pid"] in self.pids)
            and self.workload in record["workload"]
            and (record["excess_ns"] or 0) >= self.min_ms * 1e6
        )


def run(path: str, wanted: Filter, recent: int, as_json: bool) -> int:
    """Follow until interrupted. GputailError where no daemon is there to begin with."""
    client = Client(path)
    while True:
        try:
            with client:
                for message in client.follow(follow="verdicts", recent=recent):
                    _show(message, wanted, as_json)
        except NoDaemon as gone:
            _say(f"{gone.problem}; waiting for it")
        client = _again(path)
        recent = 0
        _say("following again")


def _again(path: str, pause: Callable[[float], None] = time.sleep) -> Client:
    while True:
        pause(RETRY_S)
        try:
            return Client(path)
        except NoDaemon:
            continue


def _show(message: dict[str, Any], wanted: Filter, as_json: bool) -> None:
    if message["type"] == "lost":
        _say(f"{message['count']} verdicts are missing here: they came faster than they were taken")
    if message["type"] != "verdict" or not wanted.wants(message["record"]):
        return
    text = json.dumps(message["record"], separators=(",", ":")) if as_json else line(message)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def line(message: dict[str, Any]) -> str:
    """A verdict on one line: when its request ended, of which process it was, and its story."""
    record = message["record"]
    return f"{clock(record['end_ns'])} {clean(record['comm'], 16)}[{record['pid']}] {record['cause']}: {clean(message['story'], 400)}"


def _say(text: str) -> None:
    print(f"gputail: {text}", file=sys.stderr, flush=True)
