"""A window's pairs grouped by expert, written plainly: what the kernel that does it must find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localmoe.kernels.residency import HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED, ON_HOST


@dataclass(frozen=True)
class Row:
    """One layer's part of the residency table, and the number of the last complete copy."""

    address: Sequence[int]
    home: Sequence[int]
    ticket: Sequence[int]
    score: Sequence[float]
    landing: Sequence[int]
    done: int


@dataclass(frozen=True)
class PlainTile:
    """One expert's pairs (token * K + k), where its weights are, and where they are kept, or 0."""

    expert: int
    pairs: tuple[int, ...]
    address: int
    ticket: int
    landing: int


def plain_groups(index: Sequence[Sequence[int]], live: int, row: Row) -> tuple[list[PlainTile], list[int]]:
    """(tiles, log): missing experts first, then those in slots, then those on their way; by number within."""
    num_experts = len(row.address)
    pairs: dict[int, list[int]] = {}
    for token, chosen in enumerate(index[:live]):
        for k, expert in enumerate(chosen):
            if 0 <= expert < num_experts:
                pairs.setdefault(expert, []).append(token * len(chosen) + k)
    log = [0] * num_experts
    missing = [e for e in sorted(pairs) if row.ticket[e] < 0]
    late = [e for e in sorted(pairs) if row.ticket[e] > row.done]
    here = [e for e in sorted(pairs) if 0 <= row.ticket[e] <= row.done]
    for kind, found in ((MISS, missing), (HIT, here), (LATE, late)):
        for expert in found:
            log[expert] = kind
    landing = dict.fromkeys(pairs, 0)
    spare = [
        e
        for e in range(num_experts)
        if e not in pairs and 0 <= row.ticket[e] <= row.done and row.score[e] < math.inf
    ]
    spare.sort(key=lambda e: row.score[e])  # stable: of equal scores the lowest expert goes first
    for rank, expert in enumerate(missing):
        if rank < len(row.landing) and row.landing[rank]:
            landing[expert], log[expert] = row.landing[rank], MISS_KEPT | rank << 8
        elif spare:
            victim = spare.pop(0)
            landing[expert], log[expert] = row.address[victim], MISS_REPLACED | victim << 8
    tiles = [
        PlainTile(e, tuple(pairs[e]), row.address[e], max(row.ticket[e], 0), landing[e])
        for e in (*missing, *here, *late)
    ]
    return tiles, log


def plain_after(row: Row, tiles: Sequence[PlainTile], log: Sequence[int]) -> Row:
    """The row as the next pass finds it."""
    address, ticket, landing = list(row.address), list(row.ticket), list(row.landing)
    for entry in log:
        if entry & 0xFF == MISS_REPLACED:
            address[entry >> 8], ticket[entry >> 8] = row.home[entry >> 8], ON_HOST
    for tile in tiles:
        if tile.landing:
            address[tile.expert], ticket[tile.expert] = tile.landing, 0
    kept = sum(entry & 0xFF == MISS_KEPT for entry in log)
    return Row(address, row.home, ticket, row.score, landing[kept:] + [0] * kept, row.done)
