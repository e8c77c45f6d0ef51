"""The memory limit of the container that this process runs in, if any (Linux control groups). Knows nothing
of the machine's RAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes 2^63 rounded to pages where there is no limit


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`used_bytes` leaves out file pages that the kernel would give back first."""

    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What is left under the limit."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path | None = None) -> MemoryLimit | None:
    """The limit of this process's group or of one around it that leaves the least; None without any.

    Args:
        root: where the control groups are mounted.
        membership: the file that names this process's groups; None means /proc/self/cgroup.
    """
    limits: list[MemoryLimit] = []
    for group, limit_name, used_name, inactive_key in _groups(root, membership or Path("/proc/self/cgroup")):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            limits.append(MemoryLimit(limit, max(0, used - _inactive_file(group, inactive_key))))
    return min(limits, key=lambda limit: limit.available_bytes, default=None)


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folders of this process's memory groups, inner to outer, with the names of their files."""
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                yield folder, *names


def _inactive_file(group: Path, key: str) -> int:
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
