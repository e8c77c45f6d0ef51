"""What rows are padded to, remembered in one home for all homes that tests make. Measures nothing."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

from localmoe.core.remembered import Remembered
from localmoe.engine import row_padding


@dataclass(frozen=True, slots=True)
class RememberedAt(Remembered):
    """In this home, whichever is localmoe's."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / self.file_name


def remember_row_paddings(home: Path) -> None:
    """From now on in this home: to measure them is half of a tiny model's load, and many tests load the same
    one into a home of their own. Where several processes keep some at once, what one of them has kept may be
    lost, and is measured again."""
    row_padding.FILE = RememberedAt(*astuple(row_padding.FILE), home)


def forgotten_row_paddings() -> Remembered:
    """To be set as row_padding.FILE by a test that wants them measured: in localmoe's home, as usually."""
    return Remembered(*astuple(row_padding.FILE)[:4])
