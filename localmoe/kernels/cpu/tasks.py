"""Blocks of a job of the CPU lane: which part of which expert a block is, and when its input is there. What a
block computes is in products; who takes which is the worker's business.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from localmoe.kernels.cpu.absent import record_of
from localmoe.kernels.cpu.atoms import add, compiled, fetch, load, pause, words_at
from localmoe.kernels.cpu.bf12_many import MANY, down_many, gate_up_many
from localmoe.kernels.cpu.bf12_products import codes_of as bf12_codes_of
from localmoe.kernels.cpu.bf12_products import down_bf12, gate_up_bf12
from localmoe.kernels.cpu.coded_products import codes_of, down_codes, gate_up_codes
from localmoe.kernels.cpu.codings import SCALES_ROW, code_bits, scale_span
from localmoe.kernels.cpu.control import (
    CONVERTED,
    DENSE_BIAS,
    DENSE_BLOCK,
    DENSE_COLUMNS,
    DENSE_OUT,
    DENSE_ROWS,
    DENSE_WEIGHT,
    DENSE_WIDE,
    DENSE_X,
    DOWN_ROWS,
    GATE_UP_ROWS,
    STOP,
    TASKS_X,
    THREADS,
    USES_UNIT,
    WIDER,
    WIDER_CODES,
)
from localmoe.kernels.cpu.gathered_rows import shared_at
from localmoe.kernels.cpu.products import down_columns, down_rows, gate_up_columns, gate_up_rows
from localmoe.kernels.mailbox import BEGIN, END, EXPERT, HEAD_ENTRIES, HEAD_LAYER, SHARE


@compiled
def _entry_of(starts: Any, task: int, count: int) -> int:
    for i in range(count):
        if task < starts[i + 1]:
            return i
    return 0


@compiled
def _place_of(entries: Any, i: int, count: int) -> int:
    """Of an entry in the order of pairs, which jobs whose experts are absent are not in (see absent)."""
    place = 0
    for other in range(count):
        if entries[BEGIN, other] < entries[BEGIN, i]:
            place += 1
    return place


@compiled
def _next_block(first: int, block: int, count: int, base: int) -> int:
    """Where a thread's next block begins, where threads keep pace with each other; `first` after the last."""
    after = first + block * load(base + 8 * THREADS)
    return after if after < count else first


@compiled
def gate_up_size(columned: Any, coded: Any, packed: Any) -> int:
    """Inner columns of a block. columned, coded, packed: see worker."""
    if columned is not None:
        return GATE_UP_ROWS * WIDER
    return GATE_UP_ROWS * WIDER_CODES if coded is not None or packed is not None else GATE_UP_ROWS


@compiled
def down_size(columned: Any, coded: Any) -> int:
    """Rows of a block."""
    if columned is not None:
        return DOWN_ROWS * WIDER
    return DOWN_ROWS * 8 // code_bits(coded) if coded is not None else DOWN_ROWS


@compiled
def weight_bytes(weights: int, coded: Any, packed: Any) -> int:
    """Of so many weights; in MXFP4 without what fills up the last word of scales, in FP8 as if all groups of
    columns were whole, in NVFP4 without factors, in BF12 without what is beside the codes."""
    if packed is not None:
        return weights * 3 // 2
    if coded is None:
        return 2 * weights
    size: int = weights * code_bits(coded) // 8 + weights * SCALES_ROW // scale_span(coded)
    return size


@compiled
def gate_up_task(
    task: int, base: int, head: Any, entries: Any, pairs: Any, words: Any, shape: Any, numbers: Any,
    records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any, ready: Any, scratch: Any,
    columned: Any, rowed: Any, coded: Any, packed: Any, rooms: Any, me: int, job: int,
) -> None:  # fmt: skip
    """rooms, me, job: see worker."""
    while load(base + 8 * CONVERTED) < load(base + 8 * TASKS_X):
        if load(base + 8 * STOP) != 0:
            return
        pause()
    i = _entry_of(starts[0], task, head[HEAD_ENTRIES])
    layer, expert = head[HEAD_LAYER], entries[EXPERT, i]
    width, hidden = sizes[layer], x.shape[1]
    begin, end = entries[BEGIN, i], entries[END, i]
    record = record_of(records, layer, expert, base)
    if record == 0:
        return
    bias_at = records[1, layer, expert]
    height = shape[3] * width
    bias = carray(words_at(bias_at, words), (height if bias_at != 0 else 0,))
    block = gate_up_size(columned, coded, packed)
    first = (task - starts[0, i]) * block
    last = min(first + block, entries[SHARE, i])
    after = _next_block(first, block, entries[SHARE, i], base)
    if columned is not None:
        weights = carray(words_at(record, columned), (height * hidden,))
        gate_up_columns(
            weights, bias, hidden, width, shape[3], shape[1] != 0, shape[2], numbers[0], numbers[1], first,
            last, x, rows[begin:end], pairs[begin:end], inner, scratch, words[0, 0],
        )  # fmt: skip
    if rowed is not None:
        weights = carray(words_at(record, rowed), (height * hidden,))
        gate_up_rows(
            weights, bias, hidden, width, shape[3], shape[1] != 0, shape[2], numbers[0], numbers[1], first,
            last, after, x, rows[begin:end], pairs[begin:end], inner, scratch, words[0, 0],
        )  # fmt: skip
    if coded is not None:
        gate_up_codes(
            record, bias, hidden, width, shape[3], shape[1] != 0, shape[2], numbers[0], numbers[1], first,
            last, after, x, rows[begin:end], pairs[begin:end], inner, scratch, words[0, 0], coded,
        )  # fmt: skip
    if packed is not None:
        if rooms is not None and end - begin >= MANY and load(base + 8 * USES_UNIT) != 0:
            put = shared_at(rooms[1], begin, _place_of(entries, i, head[HEAD_ENTRIES]), width)
            gate_up_many(
                record, bias, hidden, width, shape[3], shape[2], numbers[0], numbers[1], first, last, after,
                x, rows[begin:end], scratch, rooms[0][me], job, i, put,
            )  # fmt: skip
        else:
            gate_up_bf12(
                record, bias, hidden, width, shape[3], shape[2], numbers[0], numbers[1], first, last, after,
                x, rows[begin:end], pairs[begin:end], inner, scratch, words[0, 0],
            )  # fmt: skip
    add(ready.ctypes.data + 8 * i, 1)


@compiled
def down_task(
    task: int, base: int, head: Any, entries: Any, pairs: Any, words: Any, out: Any, shape: Any, records: Any,
    sizes: Any, inner: Any, starts: Any, ready: Any, scratch: Any, columned: Any, rowed: Any, coded: Any,
    packed: Any, rooms: Any, me: int, job: int,
) -> None:  # fmt: skip
    i = _entry_of(starts[1], task, head[HEAD_ENTRIES])
    layer, expert = head[HEAD_LAYER], entries[EXPERT, i]
    width, hidden = sizes[layer], out.shape[1]
    wanted = starts[0, i + 1] - starts[0, i]
    record = record_of(records, layer, expert, base)
    if record == 0:
        return
    weights_at = record + 2 * shape[3] * width * hidden
    block = down_size(columned, coded)
    first = (task - starts[1, i]) * block
    last = min(first + block, hidden)
    after = _next_block(first, block, hidden, base)
    if columned is None and load(ready.ctypes.data + 8 * i) < wanted:
        start, end = weights_at + 2 * width * first, weights_at + 2 * width * last
        if coded is not None:
            codes = record + codes_of(shape[3] * width, hidden, coded)
            start, end = codes + codes_of(first, width, coded), codes + codes_of(last, width, coded)
        if packed is not None:
            codes = record + shape[3] * bf12_codes_of(width, hidden)
            start, end = codes + bf12_codes_of(first, width), codes + bf12_codes_of(last, width)
        for at in range(start, end, 64):
            fetch(at)  # other threads still compute its input: memory need not wait for them
    while load(ready.ctypes.data + 8 * i) < wanted:
        if load(base + 8 * STOP) != 0:
            return
        pause()
    bias_at = records[2, layer, expert]
    share = entries[SHARE, i]
    has_bias = bias_at != 0 and share == width  # it comes with the whole sum only
    bias = carray(words_at(bias_at, words), (hidden if has_bias else 0,))
    these = pairs[entries[BEGIN, i] : entries[END, i]]
    if columned is not None:
        weights = carray(words_at(weights_at, columned), (width * hidden,))
        down_columns(weights, bias, hidden, share, first, last, inner, these, out, scratch)
    if rowed is not None:
        weights = carray(words_at(weights_at, rowed), (width * hidden,))
        down_rows(weights, bias, width, share, first, last, after, inner, these, out, scratch)
    if coded is not None:
        down_codes(
            record, bias, hidden, width, shape[3], share, first, last, after, inner, these, out, scratch,
            coded,
        )  # fmt: skip
    if packed is not None:
        if rooms is not None and these.shape[0] >= MANY and load(base + 8 * USES_UNIT) != 0:
            place = _place_of(entries, i, head[HEAD_ENTRIES])
            gated = shared_at(rooms[1], entries[BEGIN, i], place, width)
            down_many(
                record, bias, hidden, width, shape[3], share, first, last, after, gated, inner, these, out,
                rooms[0][me],
            )  # fmt: skip
        else:
            down_bf12(
                record, bias, hidden, width, shape[3], share, first, last, after, inner, these, out, scratch
            )


@compiled
def dense_task(
    task: int, base: int, dense: Any, like: Any, wide: Any, tokens: int, steps: Any, scratch: Any
) -> None:
    """Some columns of x W^T + b for all rows of x.

    Args:
        dense: see control. like: a word of the weights' kind where that is not float32. wide: None where it
            never is, the code for which is not compiled then. tokens: T. steps: int32 0, 1, ..., at least T.
    """
    rows, columns = dense[DENSE_ROWS], dense[DENSE_COLUMNS]
    first = task * DENSE_BLOCK
    bias = carray(words_at(dense[DENSE_BIAS], scratch), (rows if dense[DENSE_BIAS] != 0 else 0,))
    x = carray(words_at(dense[DENSE_X], scratch), (tokens, columns))
    out = carray(words_at(dense[DENSE_OUT], scratch), (tokens, rows))
    last = min(first + DENSE_BLOCK, rows)
    after = _next_block(first, DENSE_BLOCK, rows, base)
    if dense[DENSE_WIDE] == 0:
        weights = carray(words_at(dense[DENSE_WEIGHT], like), (rows * columns,))
        down_rows(weights, bias, columns, columns, first, last, after, x, steps[:tokens], out, scratch)
    elif wide is not None:
        numbers = carray(words_at(dense[DENSE_WEIGHT], scratch), (rows * columns,))
        down_rows(numbers, bias, columns, columns, first, last, after, x, steps[:tokens], out, scratch)
