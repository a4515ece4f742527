"""What the tests with Prometheus share: its programs, of the distribution's package."""

from __future__ import annotations

import shutil

import pytest


def program(name: str) -> str:
    """Where it is; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} (distribution package prometheus)")
    return found
