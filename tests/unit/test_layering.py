"""Which module may import what, and what the files of the repository may say."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gputail"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Third-party packages that one place alone imports.
ONLY_IN = {
    "bcc": "gputail/probes/",
    "elftools": "gputail/discovery/elf.py",
    "prometheus_client": "gputail/surfaces/metrics",
    "rich": "gputail/surfaces/top/",
    "shtab": "gputail/completion.py",
    "textual": "gputail/surfaces/top/",
}
# Analysis takes data: no clock, no /proc, no operating system. That makes a replay equal the live run.
# Every module is analysis but these.
NOT_ANALYSIS = {
    "__init__", "__main__", "capture", "check", "cli", "completion", "config", "daemon", "demo", "effective", "errors", "export",
    "journal", "paths", "replay", "report", "service",
    "discovery", "probes", "sim", "surfaces",
}  # fmt: skip
NOT_IN_ANALYSIS = {
    "time", "os", "datetime", "random", "subprocess", "socket", "threading", "psutil", "bcc", "elftools",
    "prometheus_client", "gputail.discovery", "gputail.surfaces", "gputail.daemon", "gputail.cli", "gputail.config", "gputail.effective",
}  # fmt: skip
# Of probes, the table alone is plain data.
PROBES_FOR_ALL = {"gputail.probes.table"}


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere in it, except for type checking alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_analysis(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in NOT_ANALYSIS


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_third_party_package_is_imported_in_its_place_alone(package: str) -> None:
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if not str(path.relative_to(ROOT)).startswith(ONLY_IN[package]) and any(within(name, package) for name in imports(path))
    ]
    assert elsewhere == []


@pytest.mark.parametrize("path", [path for path in MODULES if is_analysis(path)], ids=lambda path: path.stem)
def test_analysis_takes_data_only(path: Path) -> None:
    found = imports(path)
    assert sorted(name for name in found if any(within(name, banned) for banned in NOT_IN_ANALYSIS)) == []
    probes = {name for name in found if within(name, "gputail.probes")}
    assert all(any(within(name, allowed) for allowed in PROBES_FOR_ALL) for name in probes), probes
    assert "/proc" not in path.read_text().replace("/proc,", "")


def test_the_check_sees_what_a_module_imports(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import os.path\nfrom gputail.probes import table\ndef f():\n    from bcc import BPF\n")
    assert imports(module) == {"os.path", "gputail.probes.table", "bcc.BPF"}


# Paths and words of the machines that the code is written on, which no file of the repository may carry.
MACHINE = re.compile(r"/(work|home|Users)/[a-z]|/root/|pyenv|\bwt-[a-z]+\b", re.IGNORECASE)


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    this = Path(__file__).relative_to(ROOT)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if Path(name) == this or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # recordings and pictures
        found += [f"{name}: {match.group()}" for match in MACHINE.finditer(text)]
    assert found == []
