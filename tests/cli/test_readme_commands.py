"""The commands of the README, and of the page of its figures, are accepted as they are written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from localmoe.cli.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
PLACES = {"MODEL": "demo", "REPO": "owner/name", "NAME": "qwen3-30b-a3b"}


def commands() -> list[str]:
    """In blocks, up to what is said beside them, and in spans that name what they work on."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = re.findall(r"^ {4}localmoe (.+?)(?: {2,}.*)?$", text, re.MULTILINE)
    return [*lines, *re.findall(r"`localmoe ([^`]+ [^`]+)`", text)]


@pytest.mark.parametrize("command", commands())
def test_a_command_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [PLACES.get(word, word) for word in shlex.split(command)]
    try:
        parse_arguments(words)
    except SystemExit as end:
        assert end.code == 0, capsys.readouterr().err  # --help


def test_there_are_commands() -> None:
    assert len(commands()) > 12
