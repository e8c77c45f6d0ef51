"""What earlier runs measured of a draft's worth, in one small file of localmoe's home, so that the first
answer after a start need not find it out. Decides nothing; what is not there, or cannot be read, is measured
again.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from localmoe.core.home import localmoe_home
from localmoe.core.whole_file import write_whole

FILE_NAME = "draft-worth.json"
FORMAT = "localmoe draft worth 1"
MAX_ENTRIES = 100  # the oldest goes first

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second with the draft in VRAM, and with experts in its memory."""

    drafted_per_s: float
    plain_per_s: float


def recall(situation: str) -> Rates | None:
    """What was measured last in this situation."""
    return _read().get(situation)


def remember(situation: str, rates: Rates) -> None:
    """Keep it. A folder that cannot be written to costs the next start a measurement."""
    entries = _read()
    entries.pop(situation, None)
    entries[situation] = rates
    kept = dict(list(entries.items())[-MAX_ENTRIES:])
    found = {name: [rates.drafted_per_s, rates.plain_per_s] for name, rates in kept.items()}
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(), json.dumps({"format": FORMAT, "tokens_per_s": found}, indent=1).encode())
    except OSError as error:
        _LOG.info("what the draft is worth is not remembered: %s", error.strerror or error)


def _path() -> Path:
    return localmoe_home() / FILE_NAME


def _read() -> dict[str, Rates]:
    """Whatever of the file makes sense."""
    try:
        found = json.loads(_path().read_bytes())
    except (OSError, ValueError):
        return {}
    pairs = found.get("tokens_per_s") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if not isinstance(pairs, dict):
        return {}
    return {name: Rates(*pair) for name, pair in pairs.items() if _makes_sense(pair)}


def _makes_sense(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(rate) in (int, float) and 0 < rate < math.inf for rate in pair)
    )
