"""What is printed to stderr at a program's end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from localmoe.core.teardown import silence_teardown
{begin}
import atexit, gc

class Late:
    def __del__(self):
        os.write(2, b"so many objects leaked\\n")

late = Late()
atexit.register(lambda: print("at the exit", file=sys.stderr))
print("said", file=sys.stderr)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('why')", 1, "why"), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_all_is_printed_but_what_comes_when_python_takes_itself_apart(end: str, code: int, said: str) -> None:
    for begin, leaked in (("", True), ("silence_teardown()", False)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(begin=begin, end=end)], capture_output=True, text=True
        )
        assert done.returncode == code
        assert "said\n" in done.stderr and "at the exit\n" in done.stderr and said in done.stderr
        assert ("leaked" in done.stderr) == leaked


def test_a_program_without_stderr_ends_as_well() -> None:
    begin = "silence_teardown(); sys.stderr = None; os.close(2)"
    program = PROGRAM.format(begin=begin, end="sys.exit(4)").replace(", file=sys.stderr", "")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 4
