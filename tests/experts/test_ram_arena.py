"""The RAM of experts that lie on the disk goes back to the system."""

from __future__ import annotations

import gc

import psutil

from localmoe.experts.ram_arena import RamArena

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_ram_that_is_given_back_is_the_systems_whoever_still_knows_the_arena() -> None:
    arena = RamArena(64, MIB, None)
    for number in range(64):
        arena.place(number, MIB).fill_(1)
    gc.collect()
    held = resident()
    arena.release()
    assert held - resident() > 48 * MIB and arena.num_bytes == 0 and arena.num_places == 0
    arena.release()


def test_what_is_in_use_elsewhere_stays_until_its_last_view_goes() -> None:
    arena = RamArena(2, MIB, None)
    place = arena.place(1, 100)
    place.fill_(7)
    arena.release()
    assert place.tolist() == 100 * [7]
