"""What the documents say of the code: that what they name is there, and that what they list is whole."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from gputail.attribution import CAUSES
from gputail.budget import PARTS
from gputail.config import OPTIONS, Settings
from gputail.effective import load, variable
from gputail.tail import Contribution, RequestRecord

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FILE = re.compile(r"[\w./-]*\w\.(?:py|c|h|md|toml)\b")


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_a_document_lead_to_files_that_are_there(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_that_a_guide_names_is_there(name: str) -> None:
    """By its path, or the end of it: `gputail/` and folders that the text is about may be left out."""
    there = ["/" + path for path in files()]
    named = {mention.replace("\\_", "_") for mention in FILE.findall((ROOT / name).read_text().replace("\\_", "_"))}
    assert len(named) > 10
    assert sorted(mention for mention in named if not any(path.endswith("/" + mention.removeprefix("../")) for path in there)) == []


def section(name: str) -> str:
    """The text of a section of the manual, without its roff."""
    manual = (ROOT / "docs/man/gputail.1").read_text()
    return re.sub(r"\\f[A-Z]", "", manual.split(f"\n.SH {name}\n")[1].split("\n.SH ")[0])


def test_the_manual_explains_every_field_of_a_record_and_every_part_of_the_budget() -> None:
    record = RequestRecord(1, 1, None, "", 0, 1, "sync", 1, 1, False, True, (1,) * len(PARTS), 0, 1, "unknown", 0.0, ()).as_dict()
    words = set(re.findall(r"\w+", section("RECORDS")))
    assert sorted({*record, *record["budget"], *(field.name for field in fields(Contribution))} - words) == []


def test_the_manual_explains_every_cause_and_no_other() -> None:
    assert sorted(re.findall(r"^\.B (\w+)$", section("CAUSES"), re.MULTILINE)) == sorted(CAUSES)


def test_the_readme_explains_every_cause_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(CAUSES)


def test_the_manual_of_the_configuration_explains_every_option_with_its_default_flag_and_variable() -> None:
    manual = (ROOT / "docs/man/gputail.conf.5").read_text().replace("\\-", "-").replace("\\(dq", '"')
    entries = manual.split("\n.SH OPTIONS\n")[1].split("\n.SH ")[0].split("\n.TP\n.B ")[1:]
    told = {entry.splitlines()[0]: entry.splitlines()[-1] for entry in entries}
    defaults = [line.partition("  #")[0].strip() for line in load({}, {}, Path("/dev/null")).toml().splitlines()[1:]]
    assert told == {
        default: f"{option.flag}{' (one each)' if isinstance(getattr(Settings(), name), tuple) else ''}, {variable(name)}; "
        + ("reload" if option.is_live else "restart")
        for default, (name, option) in zip(defaults, OPTIONS.items(), strict=True)
    }


def test_the_sample_configuration_shows_every_option_with_its_default(tmp_path: Path) -> None:
    sample = (ROOT / "deploy/config.toml").read_text()
    assert load({}, {}, ROOT / "deploy/config.toml").settings == Settings()
    file = tmp_path / "config.toml"
    file.write_text(re.sub(r"^#(?=\w+ = )", "", sample, flags=re.MULTILINE))
    shown = load({}, {}, file)
    assert shown.settings == Settings()
    assert all(origin.startswith(str(file)) for origin in shown.origins.values()), shown.origins
