"""Where the files that are not Python lie: in a checkout beside the package, in a wheel inside it."""

from __future__ import annotations

from pathlib import Path

from gputail.errors import GputailError

_PACKAGE = Path(__file__).resolve().parent


def bpf_sources() -> Path:
    """The directory that holds the C sources for BCC (events.h and the *.c beside it)."""
    for directory in (_PACKAGE / "bpf", _PACKAGE.parent / "bpf"):
        if (directory / "events.h").is_file():
            return directory
    raise GputailError(f"the BPF sources are missing from {_PACKAGE / 'bpf'}", "install gputail again")
