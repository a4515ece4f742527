"""Put the BPF sources, which lie beside the package in a checkout, inside it in a wheel (gputail/paths.py finds both)."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BpfSources(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable install uses the checkout's own; a copy of them would be a second, older truth.
        if version != "editable":
            build_data["force_include"]["bpf"] = "gputail/bpf"
