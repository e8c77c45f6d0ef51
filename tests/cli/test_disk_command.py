"""Experts on the disk from the command line: the same words, and one sentence where that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localmoe.cli.main import main

ON_DISK = ("--experts-on", "disk", "--ram-budget", "4MiB", "--draft-length", "0", "--cpu-threads", "2")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    command = ("generate", "demo", "--prompt", "Hello", "--max-new-tokens", "8", "--json", "--device", "cpu")
    code, out, err = run(capsys, *command, *options)
    assert code == 0, err
    (answer,) = map(json.loads, out.splitlines())
    assert isinstance(answer, dict)
    return answer


def test_an_answer_is_that_from_ram(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    expected = generate(capsys, "--draft-length", "0")
    found = generate(capsys, *ON_DISK)
    assert found["text"] == expected["text"]
    assert found["stats"]["disk_bytes"] > 0 == expected["stats"]["disk_bytes"]  # type: ignore[index]
    assert len(list(tmp_path.rglob("*.records"))) == 1


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    command = ("generate", "demo", "--prompt", "Hello", "--device", "cpu")
    code, out, err = run(capsys, *command, *options)
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (1, "") and line.startswith("localmoe: "), err
    return line


def test_what_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.write_text("no folder")
    monkeypatch.setenv("LOCALMOE_HOME", str(home))
    assert "cannot be written" in refused(capsys, *ON_DISK)
    assert "give at least 2496KiB" in refused(capsys, *ON_DISK, "--ram-budget", "4KiB")
    assert "ask for both" in refused(capsys, "--ram-budget", "4MiB")
