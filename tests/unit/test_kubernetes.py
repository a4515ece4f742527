"""The manifests: valid by Kubernetes' own schemas, alike in what must agree, and no more allowed than the service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import gputail
from gputail.effective import load
from tests import units

FOLDER = units.ROOT / "deploy/kubernetes"
NODES, MONITOR = FOLDER / "gputail.yaml", FOLDER / "servicemonitor.yaml"


def manifests(path: Path = NODES) -> dict[str, Any]:
    """The objects of a file, by kind."""
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(path.read_text())}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["DaemonSet"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (one,) = pod()["containers"]
    return dict(one)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("kind", ["Namespace", "ConfigMap", "DaemonSet", "Service"])
def test_kubernetes_takes_each_manifest_without_an_unknown_field(kind: str, version: str) -> None:
    kubernetes_validate.validate(manifests()[kind], version, strict=True)


def test_the_check_sees_a_field_that_is_none() -> None:
    manifest = manifests()["DaemonSet"]
    manifest["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_the_pod_has_the_capabilities_of_the_service_and_no_other() -> None:
    context = container()["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert [f"CAP_{name}" for name in context["capabilities"]["add"]] == units.capabilities()
    assert (context["privileged"], context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, False, True)
    assert pod().get("hostNetwork") is pod().get("hostIPC") is None
    assert pod()["hostPID"] is True


def test_what_is_mounted_of_the_node_and_of_the_configuration_can_only_be_read() -> None:
    volumes = {volume.pop("name"): volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: mount for mount in container()["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    writable = {name for name, mount in mounts.items() if not mount.get("readOnly")}
    assert all(volumes[name].keys() == {"emptyDir"} for name in writable), writable
    assert {"hostPath", "configMap"} <= {kind for volume in volumes.values() for kind in volume}


def test_the_pods_configuration_is_one_and_serves_the_port_that_is_scraped(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(manifests()["ConfigMap"]["data"]["config.toml"])
    listen = load({}, {}, file).settings.listen
    (port,) = container()["ports"]
    (served,) = manifests()["Service"]["spec"]["ports"]
    (endpoint,) = manifests(MONITOR)["ServiceMonitor"]["spec"]["endpoints"]
    assert listen is not None and listen.port == port["containerPort"] == served["port"]
    assert port["name"] == served["targetPort"] == served["name"] == endpoint["port"] == "metrics"
    assert {container()[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe")} == {"metrics"}


def test_selectors_select_what_is_meant() -> None:
    daemons, service, monitor = manifests()["DaemonSet"], manifests()["Service"], manifests(MONITOR)["ServiceMonitor"]
    assert daemons["spec"]["template"]["metadata"]["labels"] == daemons["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    namespaces = {manifest["metadata"].get("namespace") for manifest in (daemons, service, manifests()["ConfigMap"], monitor)}
    assert namespaces == {manifests()["Namespace"]["metadata"]["name"]}


def test_the_memory_of_pod_and_service_is_the_same() -> None:
    assert container()["resources"]["limits"] == {"memory": f"{units.settings()['MemoryMax'][0]}i"}


def test_the_image_is_of_this_version() -> None:
    assert container()["image"] == f"gputail:{gputail.__version__}"
    assert re.findall(r"gputail:(\S+)", (FOLDER / "Containerfile").read_text()) == [gputail.__version__]
