"""The dashboard of deploy/grafana: what Grafana's own models take, whole, and laid out without gaps of meaning."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from .prometheus import DASHBOARD, dashboard_queries, panels

# What these models do not know and Grafana does.
UNKNOWN_TO_MODELS = {"definition", "titleFormat", "textFormat"}


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: without(one, names) for name, one in value.items() if name not in names}
    return [without(one, names) for one in value] if isinstance(value, list) else value


def test_grafanas_models_take_the_dashboard_and_lose_nothing_of_it() -> None:
    plugins.register_default_plugins()
    written = json.loads(DASHBOARD.read_text())
    taken = json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(written)))
    lost = [path for path in leaves(without(written, UNKNOWN_TO_MODELS)) if path not in leaves(taken)]
    assert lost == []


def leaves(value: Any, path: str = "") -> set[str]:
    """All that a value holds, each with where."""
    if isinstance(value, dict):
        return {leaf for name, one in value.items() for leaf in leaves(one, f"{path}/{name}")}
    if isinstance(value, list):
        return {leaf for index, one in enumerate(value) for leaf in leaves(one, f"{path}/{index}")}
    return {f"{path}={value!r}"}


def test_fleet_node_and_workload_have_their_rows() -> None:
    rows = [panel["title"] for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "row"]
    assert rows == ["Fleet", "Node: $instance", "Workload: $workload", "gputail itself"]


def test_panels_do_not_overlap_and_each_has_a_number_a_unit_and_the_chosen_datasource() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])):
            assert cell[0] < 24
            assert cells.setdefault(cell, panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_exemplars_are_on_where_requests_quantiles_are_made_of_the_buckets() -> None:
    made = [target for panel in panels() for target in panel["targets"] if "histogram_quantile" in target["expr"]]
    of_requests = [target for target in made if "gputail_request_duration_seconds_bucket" in target["expr"]]
    assert len(of_requests) == 6
    assert all(target["exemplar"] for target in of_requests)


def test_queries_know_the_job_by_the_name_that_the_scrape_configuration_gives_it() -> None:
    queries = dashboard_queries()
    assert len(queries) > 25
    assert [name for name, query in queries.items() if query.count("{") != query.count('{job="gputail"')] == []
