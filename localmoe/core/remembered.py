"""What earlier runs measured, in small files of localmoe's home, so that it need not be found out again.
Decides nothing; what is not there, or cannot be read, is measured again.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.core.whole_file import write_whole

MAX_ENTRIES = 100  # the oldest goes first

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Remembered:
    """One such file, of entries by name.

    Attributes:
        form: what it says it is. key: of its entries.
        what: they are, for a line in the log.
    """

    file_name: str
    form: str
    key: str
    what: str

    @property
    def path(self) -> Path:
        """Where it is, or would be."""
        return localmoe_home() / self.file_name

    def read(self) -> dict[str, object]:
        """Its entries, whatever their values are."""
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        ours = isinstance(found, dict) and found.get("format") == self.form
        entries = found.get(self.key) if ours else None
        return entries if isinstance(entries, dict) else {}

    def keep(self, name: str, value: object) -> None:
        """As the newest entry. A folder that cannot be written to costs the next start a measurement."""
        entries = self.read()
        entries.pop(name, None)
        entries[name] = value
        kept = dict(list(entries.items())[-MAX_ENTRIES:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"format": self.form, self.key: kept}, indent=1).encode())
        except OSError as error:
            _LOG.info("%s is not remembered: %s", self.what, error.strerror or error)
