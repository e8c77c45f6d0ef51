"""A file in Triton's cache which says that all kernels of one kind of passes are there, so that nobody has to
go through them only to compile. It goes when the cache is deleted. Knows no kernel and no pass.

Where it is wrong it costs time alone: what is missing after all is compiled when it is launched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
import triton
from triton import knobs

import localmoe

_LOG = logging.getLogger(__name__)
# of localmoe: what launches kernels, and what decides how tensors lie in memory for them
_SOURCES = ("kernels", "model", "experts")


class CompiledStamp:
    """The file of one kind of passes, which need not be there."""

    def __init__(
        self, kind: Mapping[str, object], device: torch.device, packages: Path | None = None
    ) -> None:
        """
        Args:
            kind: what decides which kernels such passes launch on a device, beside the code; JSON.
            packages: folder of localmoe's sources.
        """
        code = sources_checksum(packages or Path(localmoe.__file__).parent)
        all_of_it = [code, torch.__version__, triton.__version__, _device_facts(device), kind]
        digest = hashlib.sha256(json.dumps(all_of_it, sort_keys=True, default=str).encode()).hexdigest()
        self.path = Path(knobs.cache.dir) / f"localmoe-{digest[:32]}.compiled"

    def is_there(self) -> bool:
        """Whether such passes have run with this cache."""
        return self.path.is_file()

    def leave(self) -> None:
        """Such passes have run. A cache that cannot be written to stays without, as without kernels."""
        if self.is_there():
            return
        unfinished = self.path.with_suffix(f".tmp.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(b"")
            os.replace(unfinished, self.path)
        except OSError as error:
            _LOG.debug("Triton's cache keeps no note of what is compiled: %s", error)


@cache
def sources_checksum(packages: Path) -> str:
    """Of all modules that may launch kernels."""
    checksum = 0
    for path in sorted(path for name in _SOURCES for path in (packages / name).rglob("*.py")):
        checksum = zlib.crc32(str(path.relative_to(packages)).encode(), checksum)
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{checksum:08x}"


def _device_facts(device: torch.device) -> list[object]:
    if device.type != "cuda":
        return [device.type]
    facts = torch.cuda.get_device_properties(device)
    # blocks depend on the number of multiprocessors
    return [facts.name, facts.major, facts.minor, facts.multi_processor_count, torch.version.cuda]
