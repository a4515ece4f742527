"""The unit of the service as data, for tests of what it says and of the daemon under it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICE = ROOT / "deploy/systemd/gputail.service"


def settings(path: Path = SERVICE) -> dict[str, list[str]]:
    """The words of each setting of a unit, those of repeated ones joined, in the order of the file."""
    values: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            values[name] += value.split()
    return dict(values)


def capabilities() -> list[str]:
    """Those that the service has, as in CAP_BPF."""
    return settings()["CapabilityBoundingSet"]
