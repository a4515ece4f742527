"""docs/metrics.md names every metric that a scrape has, with its type, unit and labels, and no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from gputail import events
from gputail.blame import CulpritView
from gputail.members import CommunicatorView, RankView
from gputail.surfaces import metrics_server
from gputail.surfaces.metrics import SnapshotCollector
from tests.unit.snapshots import histogram, snapshot, view

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
SUFFIX = {"counter": "_total", "info": "_info"}
UNITS = re.compile(r"_(seconds|bytes|ratio)(?:_total)?$")


def served() -> dict[str, tuple[str, str, str]]:
    """Type, unit ("" for what is counted) and labels of each metric of a full scrape."""
    culprits = (CulpritView(556, "python3", {"foreign_kernel": 7_000_000}),)
    full = snapshot(view(), view(1001), calls={"cuLaunchKernel": histogram([2000])}, culprits=culprits)
    full = replace(full, communicators=(CommunicatorView("abcdef01", 2, 1, 0, (RankView(0, 1000, 1, 0, 0, 0, 0),), ()),))
    full = replace(full, health=replace(full.health, overhead_ratio=0.004, budget_ratio=0.01))
    collector = SnapshotCollector()
    collector.publish(full)
    found = {}
    for family in metrics_server.registry(collector).collect():
        labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        assert family.samples, f"{family.name} is not in that scrape"
        name = family.name + SUFFIX.get(family.type, "")
        unit = UNITS.search(name)
        assert not name.startswith("gputail_") or family.unit == (unit[1] if unit else ""), name
        found[name] = (family.type, unit[1] if unit else "", ", ".join(labels))
    return found


def explained() -> dict[str, tuple[str, str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.*?) ?\| .+ \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kind, unit if unit in ("seconds", "bytes", "ratio") else "", labels) for name, kind, unit, labels in rows}


def test_the_page_explains_every_metric_with_its_type_unit_and_labels_and_no_other() -> None:
    assert explained() == served()


def test_the_page_explains_every_stage_at_which_something_can_be_lost() -> None:
    stages = PAGE.read_text().partition("| stage | what was lost |")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.+`) \| .+ \|$", stages, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == {*events.KERNEL_STAGES, *events.USER_STAGES, *events.OUTLET_STAGES}
