"""Where the package's own data lies, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def bpf_sources() -> Path:
    """The folder of BPF sources: bpf/ beside the package in a checkout, gputail/bpf in a wheel."""
    here = Path(__file__).resolve().parent
    for folder in (here / "bpf", here.parent / "bpf"):
        if (folder / "events.h").is_file():
            return folder
    raise FileNotFoundError(f"no BPF sources beside {here}: the installation is incomplete")
