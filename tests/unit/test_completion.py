"""Completions hold what the parser holds, and shells take them."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gputail import cli
from gputail.completion import script

VERBS = {
    name: verb
    for action in cli.parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name, verb in action.choices.items()
}


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_every_verb_and_every_option_is_in_the_completion(shell: str) -> None:
    text = script(cli.parser(), shell)
    for name, verb in VERBS.items():
        assert re.search(rf"\b{name}\b", text)
        for option in (option for action in verb._actions for option in action.option_strings):
            # fish has options without their dashes, after -s and -l.
            wanted = f"-{'l' if option.startswith('--') else 's'} {option.lstrip('-')}" if shell == "fish" else option
            assert wanted in text, (name, option)


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_the_shell_takes_it(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    path = tmp_path / "completion"
    path.write_text(script(cli.parser(), shell))
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "replies"),
    [
        (("gputail", "to"), {"top"}),
        (("gputail", "top", "--so"), {"--socket", "--sort"}),
        (("gputail", "top", "--sort", "p"), {"p50", "p99", "p99.9"}),
        (("gputail", "completion", ""), {"bash", "zsh", "fish"}),
        (("gputail", "events", "--ca"), {"--cause"}),
    ],
)
def test_bash_completes_with_it(words: tuple[str, ...], replies: set[str], tmp_path: Path) -> None:
    path = tmp_path / "completion"
    path.write_text(script(cli.parser(), "bash"))
    quoted = " ".join(f"'{word}'" for word in words)
    code = f'source {path}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_gputail gputail; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert set(done.stdout.split()) == replies, done.stderr
