"""The rules of deploy/prometheus: valid, tested by promtool, each alert both ways, and about metrics that there are."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from .conftest import program

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
TESTS = tuple(Path(__file__).with_name(name) for name in ("rules.test.yml", "collectives.test.yml"))
FILES = tuple(FOLDER / name for name in ("gputail.rules.yml", "gputail.alerts.yml", "collectives.rules.yml"))


def rules() -> list[dict[str, Any]]:
    return [rule for file in FILES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_rules_and_configuration() -> None:
    promtool("check", "rules", *map(str, FILES))
    promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_rules_and_alerts_do_what_their_tests_say() -> None:
    promtool("test", "rules", *map(str, TESTS))


def test_every_alert_is_tested_to_come_and_not_to_come() -> None:
    tested: defaultdict[str, set[bool]] = defaultdict(set)
    for test in (test for file in TESTS for test in yaml.safe_load(file.read_text())["tests"]):
        for case in test.get("alert_rule_test", ()):
            tested[case["alertname"]].add(bool(case["exp_alerts"]))
    assert dict(tested) == {rule["alert"]: {True, False} for rule in rules() if "alert" in rule}


def test_rules_are_about_metrics_that_there_are() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    explained |= {f"{name}{suffix}" for name in explained for suffix in ("_bucket", "_count", "_sum")} | {"up"}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded
    for rule in rules():
        expression = re.sub(r'"[^"]*"', "", rule["expr"])
        names = set(re.findall(r"[\w:]*gputail[_:][\w:]+|\bup\b", expression))
        assert names and names <= explained | recorded, rule


def test_the_page_names_every_alert_and_no_other() -> None:
    table = (ROOT / "docs/metrics.md").read_text().partition("| alert | when |")[2]
    assert set(re.findall(r"\bGputail\w+", table)) == {rule["alert"] for rule in rules() if "alert" in rule}


def test_every_alert_says_where_what_and_how_bad() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
            assert rule["annotations"]["description"]
