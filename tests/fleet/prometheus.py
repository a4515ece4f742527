"""A Prometheus of the test's own, with the rules of deploy/prometheus, and the dashboard's queries."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.live.conftest import free_port

from .conftest import program

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/gputail.json"
RULES = ("gputail.rules.yml", "gputail.alerts.yml", "collectives.rules.yml")
DEADLINE_S = 60


def wait_until(condition: Callable[[], Any], what: Callable[[], object]) -> None:
    """Wait for something that must come; how long it takes is no matter short of the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what()}"
        time.sleep(0.1)


class Prometheus:
    """One that runs, and its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=DEADLINE_S):
                return True
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data that an endpoint of /api/v1 answers with."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query; NaN is no value."""
        found = [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expression)["result"]]
        return [(labels, value) for labels, value in found if value == value]

    def targets(self) -> list[dict[str, Any]]:
        return list(self.get("targets", state="active")["activeTargets"])

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Exemplars of the last hour, each with the labels of its series."""
        now = time.time()
        series = self.get("query_exemplars", query=expression, start=str(now - 3600), end=str(now + 60))
        return [{**exemplar, "series": one["seriesLabels"]} for one in series for exemplar in one["exemplars"]]


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], **scrape: object) -> Iterator[Prometheus]:
    """Scrapes these once a second and evaluates the rules as often. scrape: further keys of the scrape configuration."""
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(FOLDER / name) for name in RULES]
    (job,) = configuration["scrape_configs"]
    job |= {"static_configs": [{"targets": list(targets)}], **scrape}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = [
        program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--storage.tsdb.retention.time=1d",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        made = Prometheus(port)
        wait_until(lambda: running.poll() is not None or made.is_ready(), lambda: (folder / "prometheus.log").read_text())
        assert running.poll() is None, (folder / "prometheus.log").read_text()
        yield made
    finally:
        running.terminate()
        running.wait()


def recorded() -> list[str]:
    """Selectors of all that the recording rules make."""
    rules = [rule for group in yaml.safe_load((FOLDER / RULES[0]).read_text())["groups"] for rule in group["rules"]]
    return [rule["record"] + "".join(f'{{{name}="{value}"}}' for name, value in rule.get("labels", {}).items()) for rule in rules]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without rows."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> dict[str, str]:
    """Each query of the dashboard by panel and letter, with everything chosen and a rate's interval of a minute."""
    return {
        f"{panel['title']} {target['refId']}": re.sub(r"\$(instance|workload)\b", ".*", target["expr"]).replace("$__rate_interval", "1m")
        for panel in panels()
        for target in panel["targets"]
    }


def all_answer(running: Prometheus) -> None:
    """Every recording rule and every query of the dashboard comes to give data, and no rule fails."""
    wanted = {name: name for name in recorded()} | dashboard_queries()
    missing = dict(wanted)

    def is_whole() -> bool:
        for name in list(missing):
            if running.query(missing[name]):
                del missing[name]
        return not missing

    wait_until(is_whole, lambda: missing)
    rules = [rule for group in running.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > len(recorded())
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
