"""What is printed arrives whole, whatever stdout is, or the command says in one sentence that it cannot."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localmoe.cli import bench_report, simulate
from localmoe.cli.main import main
from localmoe.cli.output import ProgressBars, note, print_json, print_pairs, print_table
from localmoe.cli.streams import sound_streams
from localmoe.core.types import Progress

TEXT = "日本 \N{GRINNING FACE} é"


class _Refusing(io.RawIOBase):
    """A file that takes nothing, until it is let go."""

    def __init__(self, error: OSError) -> None:
        self.error: OSError | None = error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.error is not None:
            raise self.error
        return len(data)


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", [("models",), ("models", "--json"), ("--version",)])
def test_a_full_disk_is_one_sentence(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = _Refusing(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"))
    assert main(command) == 1
    raw.error = None
    err = capsys.readouterr().err
    assert err.startswith("localmoe: What is printed cannot be written (No space left on device): ")
    assert err.count("\n") == 1


def test_a_reader_that_went_away_is_told_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = _Refusing(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"))
    assert main(("models", "--json")) == 1
    raw.error = None
    assert capsys.readouterr().err == ""


def test_a_command_runs_where_stdout_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(("models",)) == main(("models", "--json")) == 0


@pytest.mark.parametrize("closed", [True, False])
def test_a_stderr_that_takes_nothing_ends_no_work_and_leaves_the_exit_code(
    closed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = _Refusing(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    stderr = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)
    monkeypatch.setattr(sys, "stderr", None if closed else stderr)
    with sound_streams():
        note("a note")
        with ProgressBars() as progress:
            progress(Progress("reading", 1, 2, "bytes"))
        print("what was asked for")
    assert capsys.readouterr().out == "what was asked for\n"
    assert main(("rm", "org/none")) == 1
    raw.error = None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
@pytest.mark.parametrize(("command", "code"), [("models --json", 0), ("rm org/none", 1), ("rm", 2)])
def test_a_process_with_a_full_stderr_has_the_exit_code_of_its_work(
    command: str, code: int, tmp_path: Path
) -> None:
    noted = "import sys; from localmoe.cli import main, report, output; from localmoe.cli.main import main"
    noted += "; show = report.print_json; report.print_json = lambda x: (output.note('a note'), show(x))"
    env = {**os.environ, "LOCALMOE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    env.pop("PYTHONUNBUFFERED", None)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{noted}; sys.exit(main())", *command.split()],
            env=env, stdout=subprocess.PIPE, stderr=full,
        )  # fmt: skip
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_the_refusal_of_another_file_is_not_taken_for_that_of_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError), sound_streams():
        (tmp_path / "none" / "file").write_text("text")


def test_files_and_pipes_get_utf_8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="cp1252"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="ascii"))
    with sound_streams():
        print_json({"text": TEXT, "id": "a\ud800b"})
        print(TEXT)
        print_table(None, [TEXT], [])
        note(TEXT)
        sys.stderr.flush()
    lines = out.getvalue().decode("utf-8").splitlines()
    assert json.loads(lines[0]) == {"text": TEXT, "id": "a\ud800b"} and TEXT in lines[0]
    assert lines[1] == TEXT and any(TEXT in line for line in lines[2:])
    assert err.getvalue().decode("utf-8").splitlines() == [TEXT]


def test_what_a_terminal_has_no_character_for_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = _Terminal()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="cp1252"))
    with sound_streams():
        print_json({"text": TEXT})
        print(TEXT)
    first, second = out.getvalue().decode("cp1252").splitlines()
    assert json.loads(first) == {"text": TEXT}
    assert second == "\\u65e5\\u672c \\U0001f600 é"


@pytest.mark.parametrize("name", ["a [v2] b", "[/bold]", ":smile:"])
@pytest.mark.parametrize("terminal", [True, False])
def test_names_with_brackets_and_colons_are_printed_as_they_are(
    name: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = (_Terminal(), _Terminal()) if terminal else (io.BytesIO(), io.BytesIO())
    for variable, value in (("NO_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(variable, value)  # colours could be within a name
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8"))
    with sound_streams():
        print_table(name, [name], [[name]])
        print_pairs(name, [(name, name)])
        with ProgressBars() as progress:
            progress(Progress(name, 1, 2, "bytes", detail=name))
    assert out.getvalue().decode().count(name) == 6
    assert err.getvalue().decode().count(name) >= (2 if terminal else 0)


@pytest.mark.parametrize("columns", [bench_report.COLUMNS, simulate.COLUMNS])
@pytest.mark.parametrize("width", [50, 80, 120, 250])
def test_no_figure_is_cut_in_a_narrow_terminal(
    width: int, columns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _Terminal()
    for variable, value in (("NO_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(width))):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
    names = ("moe-infinity, auto", "on-demand, 4")
    rows = [
        (name, *(f"{line}{i:02}.{i} %" for i in range(1, len(columns)))) for line, name in enumerate(names)
    ]
    with sound_streams():
        print_table("The title", columns, rows)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue().decode())
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.count("The title") == 1 and all(text.count(cell) == 1 for row in rows for cell in row[1:])
    for line in lines:  # a figure stands behind its line's name
        assert not any(cell in line for cell in rows[1][1:]) or line.split("\u2502")[1].strip() == names[1]
    assert (text.count(names[0]) == 1) == (width > 120)
