"""The recording rules and alerts of deploy/prometheus do what they say, as Prometheus's own tool finds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"


@pytest.mark.parametrize("test", sorted(path.name for path in RULES.glob("*.test.yml")))
def test_rules_and_alerts_give_what_their_tests_say(test: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (package prometheus)")
    for command in (["check", "rules", test.replace(".test.", ".rules.")], ["test", "rules", test]):
        done = subprocess.run(["promtool", *command], cwd=RULES, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_of_rules_has_its_tests() -> None:
    rules = {path.name.replace(".rules.", ".test.") for path in RULES.glob("*.rules.yml")}
    assert rules and rules == {path.name for path in RULES.glob("*.test.yml")}
