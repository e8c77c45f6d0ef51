"""How much host RAM a model may take, so that the machine never swaps and the driver can pin what a GPU
reads. Measures nothing and divides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localmoe.core.units import format_bytes
from localmoe.hardware.facts import Hardware

RESERVE_BYTES = 2 << 30  # left to the system and other programs, at least
RESERVE_SHARE = 0.05  # of all RAM, if that is more
RESERVE_LIMIT = 0.25  # of what is available, at most: a small model loads on a busy machine too
CPU_SHARE = 0.8  # of what is available, where the target computes in RAM as well
TEXTS_SHARE = 1 / 16  # of all RAM: keys and values of chats that were left, so that one can go back to them
WINDOWS_PINNED_SHARE = 0.5  # of all RAM: what Windows lets a GPU's driver pin, under WSL 2 too


@dataclass(frozen=True, slots=True)
class HostRoom:
    """What may be taken of the host's RAM.

    Attributes:
        available_bytes: free now, or held for this model already.
        room_bytes: of that, what a model may take.
        reason: why not all of it, with its number, for a refusal.
        holds_slots: whether the "device" is this RAM too, so that a budget counts beside the records.
    """

    available_bytes: int
    room_bytes: int
    reason: str
    holds_slots: bool


def host_room(hardware: Hardware, *, device: Literal["cpu", "cuda"], held_bytes: int = 0) -> HostRoom:
    """The room on this machine. NVIDIA's driver applies no locked-memory limit (RLIMIT_MEMLOCK) on Linux, so
    there pinned memory is limited by RAM alone.

    Args:
        held_bytes: RAM that this model holds already and will use again.
    """
    available = hardware.ram_available_bytes + held_bytes
    reserve = _reserve(hardware.ram_total_bytes, available)
    room, reason = available - reserve, f"{format_bytes(reserve)} of them stay free for the system"
    if device == "cpu":
        if int(available * CPU_SHARE) < room:
            room = int(available * CPU_SHARE)
            reason = f"{format_bytes(available - room)} of them stay free for the system"
        return HostRoom(available, room, reason, holds_slots=True)
    if is_windows(hardware.platform):
        pinned = int(hardware.ram_total_bytes * WINDOWS_PINNED_SHARE)
        if pinned < room:
            room, reason = (
                pinned,
                f"Windows lets the GPU's driver pin {format_bytes(pinned)}, half of the RAM",
            )
    return HostRoom(available, room, reason, holds_slots=False)


def texts_room(total_bytes: int, available_bytes: int, held_bytes: int, limit_bytes: int | None) -> int:
    """How much RAM texts that were left may take, those that are held already among them.

    Args:
        total_bytes, available_bytes: of RAM, now.
        held_bytes: by such texts.
        limit_bytes: that somebody set; None: TEXTS_SHARE of all.
    """
    available = available_bytes + held_bytes
    limit = int(total_bytes * TEXTS_SHARE) if limit_bytes is None else limit_bytes
    return max(0, min(limit, available - _reserve(total_bytes, available)))


def _reserve(total_bytes: int, available_bytes: int) -> int:
    reserve = max(RESERVE_BYTES, int(total_bytes * RESERVE_SHARE))
    return min(reserve, int(available_bytes * RESERVE_LIMIT))


def is_windows(platform: str) -> bool:
    """Windows, or Linux on its kernel (WSL 2), whose release names Microsoft."""
    return platform.startswith("Windows") or "microsoft" in platform.lower()
