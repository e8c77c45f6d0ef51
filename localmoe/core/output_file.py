"""Files that a user names to be written, with one sentence where they cannot be. Knows nothing of what they
hold."""

from __future__ import annotations

from pathlib import Path

from localmoe.core.errors import ConfigError
from localmoe.core.whole_file import check_writable, write_whole


def check_output(what: str, path: Path) -> None:
    """See that a file can be put there: before the work whose result it is. what: "The trace".

    Raises:
        ConfigError: none can, as its folder does not exist or takes none.
    """
    try:
        check_writable(path)
    except OSError as error:
        raise _unwritable(what, path, error) from error


def write_output(what: str, path: Path, data: bytes) -> None:
    """Save under this very name; a file of that name is replaced once the new one is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise _unwritable(what, path, error) from error


def _unwritable(what: str, path: Path, error: OSError) -> ConfigError:
    reason = f"{what} {path} cannot be written ({error.strerror or error})"
    return ConfigError(f"{reason}: name a file in a folder that exists and that you may write to.")
