"""Attention of a few tokens over a cache in float32, in blocks of its positions, each of which is a task.

A row's partial result of a block depends on that row and that block alone, and partial results are added in
the order of the blocks (split-KV attention with a fixed split, as kernels.attention): a row has the same bits
whatever rows ride along. A block that a row may not see contributes nothing. Dimension letters: D of a query
and a key, V of a value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from localmoe.kernels.cpu.atoms import add, compiled, fetch, words_at
from localmoe.kernels.cpu.control import (
    ATTEND_BLOCKS,
    ATTEND_DIM,
    ATTEND_GROUP,
    ATTEND_HEADS,
    ATTEND_KEY_HEAD,
    ATTEND_KEYS,
    ATTEND_MASK,
    ATTEND_MASK_HEAD,
    ATTEND_MASK_ROW,
    ATTEND_OUT,
    ATTEND_PARTS,
    ATTEND_PLACES,
    ATTEND_POSITIONS,
    ATTEND_QUERY,
    ATTEND_QUERY_HEAD,
    ATTEND_SINKS,
    ATTEND_SUMS,
    ATTEND_TALLIES,
    ATTEND_TOPS,
    ATTEND_VALUE_DIM,
    ATTEND_VALUE_HEAD,
    ATTEND_VALUES,
)
from localmoe.kernels.cpu.exponential import exponentials
from localmoe.kernels.cpu.products import add_scaled, columns, dots, some

_AHEAD = 8192  # bytes of keys that are fetched before they are used, also of the block to come
_HIDDEN = np.float32(-np.inf)


@compiled
def attend_task(task: int, attention: Any, tokens: int, steps: Any, scratch: Any) -> None:
    """One block of one KV head, for all rows; whoever ends a KV head's last one adds them up.

    Args:
        attention: what control says of such a job, and float32: the factor of the scores, and their soft
            cap, 0 for none. None where no such job comes, the code for which is not compiled then.
        steps: int32 0, 1, ..., at least as many as rows.
        scratch: float32, contiguous, at least 2 * rows * ATTEND_POSITIONS numbers.
    """
    if attention is None:
        return
    attend, factors = attention
    blocks, group = attend[ATTEND_BLOCKS], attend[ATTEND_GROUP]
    head, block = task // blocks, task % blocks
    count = group * tokens
    at = task * count  # of its partial results
    tops = carray(words_at(attend[ATTEND_TOPS] + 4 * at, scratch), (count,))
    sums = carray(words_at(attend[ATTEND_SUMS] + 4 * at, scratch), (count,))
    if _look(head, block, attend, tokens, count, sums):
        flat = scratch.reshape(scratch.size)
        _scores(head, block, attend, tokens, count, flat)
        size = count * ATTEND_POSITIONS
        chances = flat[size : 2 * size].reshape((count, ATTEND_POSITIONS))
        _chances(head, block, attend, factors, tokens, count, flat, chances, tops, sums)
        width = attend[ATTEND_VALUE_DIM]
        start = (
            attend[ATTEND_VALUES] + head * attend[ATTEND_VALUE_HEAD] + 4 * block * ATTEND_POSITIONS * width
        )
        values = carray(words_at(start, scratch), (ATTEND_POSITIONS * width,))
        parts = carray(words_at(attend[ATTEND_PARTS] + 4 * at * width, scratch), (count, width))
        i = 0
        while i < count:
            together = some(count - i)
            columns(
                values, width, 0, width, chances, steps[i : i + together], ATTEND_POSITIONS,
                parts[i : i + together],
            )  # fmt: skip
            i += together
    if add(attend[ATTEND_TALLIES] + 8 * head, 1) + 1 == blocks:
        _add_up(head, attend, tokens, count, scratch)


@compiled
def _sees(head: int, block: int, row: int, attend: Any, tokens: int) -> Any:
    """uint8 (ATTEND_POSITIONS,): what a row may look at."""
    at = attend[ATTEND_MASK] + (head * attend[ATTEND_GROUP] + row // tokens) * attend[ATTEND_MASK_HEAD]
    at += (row % tokens) * attend[ATTEND_MASK_ROW] + block * ATTEND_POSITIONS
    return carray(words_at(at, np.uint8(0)), (ATTEND_POSITIONS,))


@compiled
def _look(head: int, block: int, attend: Any, tokens: int, count: int, sums: Any) -> bool:
    """Whether any row may look at the block; sums become 0 for those that may not, and 1 for the others."""
    found = False
    for i in range(count):
        sums[i] = np.float32(0)
        for seen in _sees(head, block, i, attend, tokens):
            if seen != 0:
                sums[i] = np.float32(1)
                found = True
                break
    return found


@compiled
def _scores(head: int, block: int, attend: Any, tokens: int, count: int, flat: Any) -> None:
    """Products of all rows with the block's keys into the first numbers of `flat`, (positions, rows)."""
    width, group = attend[ATTEND_DIM], attend[ATTEND_GROUP]
    scores = flat[: ATTEND_POSITIONS * count].reshape((ATTEND_POSITIONS, count))
    query = carray(
        words_at(attend[ATTEND_QUERY] + head * group * attend[ATTEND_QUERY_HEAD], flat), (count, width)
    )
    places = carray(words_at(attend[ATTEND_PLACES], np.int32(0)), (count,))
    row = 4 * width  # bytes
    at = attend[ATTEND_KEYS] + head * attend[ATTEND_KEY_HEAD] + block * ATTEND_POSITIONS * row
    keys = carray(words_at(at, flat), (ATTEND_POSITIONS * width,))
    value_row = 4 * attend[ATTEND_VALUE_DIM]
    values_at = attend[ATTEND_VALUES] + head * attend[ATTEND_VALUE_HEAD]
    values_at += block * ATTEND_POSITIONS * value_row
    for p in range(0, ATTEND_POSITIONS, 4):
        for line in range(values_at + p * value_row, values_at + (p + 4) * value_row, 64):
            fetch(line)  # they are asked for by the time that they are needed
        dots(keys, at + p * row, at + (p + 2) * row, row, _AHEAD, query, places, width, scores[p : p + 4])


@compiled
def _chances(
    head: int, block: int, attend: Any, factors: Any, tokens: int, count: int, flat: Any, chances: Any,
    tops: Any, sums: Any,
) -> None:  # fmt: skip
    """exp(score - top) of what each row may see, 0 of the rest; top, and their sum."""
    scale, cap = factors[0], factors[1]
    for i in range(count):
        if sums[i] == 0:
            for p in range(ATTEND_POSITIONS):
                chances[i, p] = np.float32(0)
            tops[i] = _HIDDEN
            continue
        seen, top = _sees(head, block, i, attend, tokens), _HIDDEN
        for p in range(ATTEND_POSITIONS):
            score = flat[p * count + i] * scale
            if cap != 0:
                score = np.float32(math.tanh(score / cap)) * cap
            if seen[p] == 0:
                score = _HIDDEN
            chances[i, p] = score
            if score > top:
                top = score
        tops[i] = top
        sums[i] = exponentials(chances.ctypes.data + 4 * i * ATTEND_POSITIONS, ATTEND_POSITIONS, top)


@compiled
def _add_up(head: int, attend: Any, tokens: int, count: int, like: Any) -> None:
    """A KV head's rows of what comes out, from all its blocks."""
    blocks, group, width = attend[ATTEND_BLOCKS], attend[ATTEND_GROUP], attend[ATTEND_VALUE_DIM]
    first = head * blocks * count
    tops = carray(words_at(attend[ATTEND_TOPS] + 4 * first, like), (blocks, count))
    sums = carray(words_at(attend[ATTEND_SUMS] + 4 * first, like), (blocks, count))
    parts = carray(words_at(attend[ATTEND_PARTS] + 4 * first * width, like), (blocks, count, width))
    for i in range(count):
        top, whole = _HIDDEN, np.float32(0)
        for block in range(blocks):
            if sums[block, i] != 0 and tops[block, i] > top:
                top = tops[block, i]
        number = head * group + i // tokens
        if attend[ATTEND_SINKS] != 0:
            sink = carray(words_at(attend[ATTEND_SINKS] + 4 * number, like), (1,))[0]
            top = max(top, sink)
        place = (i % tokens) * attend[ATTEND_HEADS] + number
        out = carray(words_at(attend[ATTEND_OUT] + 4 * place * width, like), (width,))
        for j in range(width):
            out[j] = np.float32(0)
        for block in range(blocks):
            if sums[block, i] != 0:
                factor = np.float32(math.exp(tops[block, i] - top))
                whole += sums[block, i] * factor
                add_scaled(out, parts[block, i], factor)
        if attend[ATTEND_SINKS] != 0:
            whole += np.float32(math.exp(sink - top))
        for j in range(width):
            out[j] /= whole
