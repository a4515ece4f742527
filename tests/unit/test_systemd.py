"""The unit of the service: taken by systemd without complaint, and no more allowed than it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gputail.probes import capabilities as needed
from tests import units

MOST_EXPOSED = 4.0
NEWER = {"RestartSteps", "RestartMaxDelaySec"}  # settings of systemd 254, which older ones name and leave out


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, made to start a program that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze (package systemd)")
    path = tmp_path / "gputail.service"
    path.write_text(units.SERVICE.read_text().replace("ExecStart=/usr/bin/gputail", "ExecStart=/bin/true"))
    return path


def test_systemd_takes_the_unit_without_complaint(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    said = done.stdout + done.stderr
    complaints = [line for line in said.splitlines() if not any(f"Unknown key '{name}'" in line for name in NEWER)]
    assert (done.returncode, complaints) == (0, [])


def test_the_check_sees_a_setting_that_is_none(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSeconds="))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert "WatchdogSeconds" in done.stdout + done.stderr


def test_systemd_finds_the_service_little_exposed(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze security has no --offline (systemd 250)")
    found = re.search(r"Overall exposure level for gputail.service: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) < MOST_EXPOSED


def test_every_capability_is_needed_and_has_its_reason_before_it() -> None:
    text = units.SERVICE.read_text()
    assert units.settings()["AmbientCapabilities"] == units.capabilities()
    assert set(needed.NEEDED) < set(units.capabilities())
    assert "CAP_SYS_ADMIN" not in units.capabilities()
    for name in units.capabilities():
        reasons, _, _ = text.partition(f"AmbientCapabilities={name}\n")
        assert re.search(rf"\n# {name}: (?:.*\n# )*.*\n\Z", reasons), name


def test_the_drop_in_for_older_kernels_adds_the_one_that_is_missing() -> None:
    added = units.settings(units.SERVICE.parent / "linux-before-6.6.conf")
    assert added == {"AmbientCapabilities": ["CAP_SYS_ADMIN"], "CapabilityBoundingSet": ["CAP_SYS_ADMIN"]}


def test_the_user_of_the_service_is_made_by_sysusers() -> None:
    (user,) = units.settings()["User"]
    assert f"\nu {user} - " in (units.SERVICE.parent / "sysusers.conf").read_text()
