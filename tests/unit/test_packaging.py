"""A wheel holds all that an installed gputail needs and runs from a clean environment; the version is written once."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gputail
from gputail.paths import bpf_sources

ROOT = Path(__file__).resolve().parents[2]


def build(what: str, checkout: Path, directory: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", what, "--directory", directory]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (path,) = directory.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


def sources(directory: str, pattern: str) -> set[Path]:
    return {path.relative_to(ROOT) for path in (ROOT / directory).rglob("*") if path.is_file() and re.search(pattern, path.name)}


def test_a_wheel_holds_every_module_and_every_c_source(wheel: zipfile.ZipFile) -> None:
    wanted = {str(path) for path in sources("gputail", r"\.(py|c|h)$")} | {f"gputail/{path}" for path in sources("bpf", r"\.(c|h)$")}
    assert "gputail/bpf/events.h" in wanted
    assert wanted - set(wheel.namelist()) == set()


def test_a_wheel_holds_the_manuals_and_the_licence(wheel: zipfile.ZipFile) -> None:
    names = [name.partition("/")[2] for name in wheel.namelist()]
    assert {f"data/share/man/man{path.suffix[1:]}/{path.name}" for path in (ROOT / "docs/man").iterdir()} <= set(names)
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


def test_an_sdist_makes_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path)
    again = zipfile.ZipFile(build("wheel", tmp_path / f"gputail-{gputail.__version__}", tmp_path / "wheel"))
    assert {entry.filename: entry.CRC for entry in again.infolist()} == {entry.filename: entry.CRC for entry in wheel.infolist()}


def test_a_wheel_in_a_clean_environment_runs(wheel_file: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel_file]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = tmp_path / "venv/bin/gputail"
    said = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (said.stdout, said.stderr) == (f"gputail {gputail.__version__}\n", "")
    recording = ROOT / "tests/data/h200/gdevsync.gpt"
    replayed = subprocess.run([command, "replay", recording], cwd=tmp_path, capture_output=True, text=True)
    here = subprocess.run([sys.executable, "-m", "gputail", "replay", recording], cwd=ROOT, capture_output=True, text=True)
    assert (replayed.returncode, replayed.stderr) == (0, here.stderr)
    assert replayed.stdout == here.stdout != ""


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


def test_what_the_debian_package_leaves_to_the_distribution_it_depends_on() -> None:
    (left,) = re.findall(r"^FROM_DISTRIBUTION=\((.*)\)", (ROOT / "scripts/package").read_text(), re.MULTILINE)
    (depends,) = re.findall(r"^Depends: (.*)", (ROOT / "deploy/debian/control.in").read_text(), re.MULTILINE)
    required = dict(re.findall(r'^    "([\w-]+)>=([\d.]+),', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    versions = {name: version.partition(":")[2] or version for name, version in re.findall(r"python3-(\w+) \(>= ([\d.:]+)\)", depends)}
    assert versions == {name: required[name] for name in left.split()}
    assert "python3-bpfcc" in depends


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm"])
def test_a_script_of_the_debian_package_is_one_that_a_shell_can_read(script: str) -> None:
    done = subprocess.run(["sh", "-n", ROOT / "deploy/debian" / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
