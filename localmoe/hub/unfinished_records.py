"""Files of experts (experts.record_file) that are being written, and what is left of those whose process
ended before they were whole. Writes none."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.hub.hf_cache import folder_names
from localmoe.hub.process_marks import is_running, own_mark

_LOG = logging.getLogger(__name__)
_PART = re.compile(r"\.(\d+)-(\d+)-\d+\.part$")
_NUMBERS = count()  # of the files that this process has begun


def unfinished_name(name: str) -> str:
    """Of a file that will have this name; no other file has it."""
    return f".{name.removeprefix('.')}.{own_mark()}-{next(_NUMBERS)}.part"


def remove_leftovers(folder: Path) -> None:
    """Of processes that ended before their file was whole."""
    with suppress(OSError):
        for found in folder.glob(".experts-*.part"):
            named = _PART.search(found.name)
            if named and not is_running(int(named[1]), int(named[2])):
                _LOG.info("removing %s, which a process that has ended left unfinished", found)
                found.unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()  # if nothing else was made


def remove_all_leftovers() -> None:
    """In localmoe's home: they may be what fills the disk, of models that nobody loads again."""
    drafts = localmoe_home() / "drafts"
    for place in (localmoe_home() / "synthetic", *(drafts / name for name in folder_names(drafts))):
        remove_leftovers(place)
