"""A wheel holds all that an installed gputail needs, and the version is written once."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gputail
from gputail.paths import bpf_sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = directory.glob("*.whl")
    return zipfile.ZipFile(path)


def sources(directory: str, pattern: str) -> set[Path]:
    return {path.relative_to(ROOT) for path in (ROOT / directory).rglob("*") if path.is_file() and re.search(pattern, path.name)}


def test_a_wheel_holds_every_module_and_every_c_source(wheel: zipfile.ZipFile) -> None:
    wanted = {str(path) for path in sources("gputail", r"\.(py|c|h)$")} | {f"gputail/{path}" for path in sources("bpf", r"\.(c|h)$")}
    assert "gputail/bpf/events.h" in wanted
    assert wanted - set(wheel.namelist()) == set()


def test_a_wheel_holds_the_manual_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = [name.partition("/")[2] for name in wheel.namelist()]
    assert "data/share/man/man1/gputail.1" in names
    assert "licenses/LICENSE" in names


def test_a_wheel_installs_nothing_beside_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    version = gputail.__version__
    assert tops == {"gputail", f"gputail-{version}.dist-info", f"gputail-{version}.data"}


def test_an_installed_wheel_finds_its_bpf_sources(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "from gputail.paths import bpf_sources; print(bpf_sources())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "gputail" / "bpf")


def test_a_checkout_finds_its_bpf_sources() -> None:
    assert bpf_sources() == ROOT / "bpf"


def test_bcc_is_no_dependency(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    required = re.findall(r"^Requires-Dist: ([\w.-]+)", wheel.read(name).decode(), re.MULTILINE)
    assert "numpy" in required
    assert "bcc" not in required


def test_the_version_is_written_once(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None and f"-{gputail.__version__}-" in wheel.filename
    assert gputail.__version__ not in (ROOT / "pyproject.toml").read_text()
