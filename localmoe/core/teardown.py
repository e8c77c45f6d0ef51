"""Lets a program end without what libraries report of themselves when Python takes itself apart: newer
versions of Triton name some hundred of their own objects then, since what is imported for good is not looked
through for garbage (`uncollected`), and looking through it would take a second or two of each command.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress


def silence_teardown() -> None:
    """From the end of the program's last line on, and of all that was to run at its exit and is registered
    after this, nothing is printed any more. For a program of localmoe's own, at its beginning; exit codes
    stay what they are."""
    atexit.register(_drop_stderr)


def _drop_stderr() -> None:
    with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
