"""Blocks of a job of the CPU lane: which part of which expert a block is, and when its input is there. What a
block computes is in products; who takes which is the worker's business.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from localmoe.kernels.cpu.atoms import add, compiled, fetch, load, pause, words_at
from localmoe.kernels.cpu.control import DOWN_ROWS, GATE_UP_ROWS, STOP, WIDER
from localmoe.kernels.cpu.products import down_columns, down_rows, gate_up_columns, gate_up_rows
from localmoe.kernels.mailbox import BEGIN, END, EXPERT, HEAD_ENTRIES, HEAD_LAYER, SHARE


@compiled
def _entry_of(starts: Any, task: int, count: int) -> int:
    for i in range(count):
        if task < starts[i + 1]:
            return i
    return 0


@compiled
def gate_up_task(
    task: int, base: int, head: Any, entries: Any, pairs: Any, words: Any, shape: Any, numbers: Any,
    records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any, ready: Any, scratch: Any,
    columned: Any, rowed: Any,
) -> None:  # fmt: skip
    i = _entry_of(starts[0], task, head[HEAD_ENTRIES])
    layer, expert = head[HEAD_LAYER], entries[EXPERT, i]
    width, hidden = sizes[layer], x.shape[1]
    begin, end = entries[BEGIN, i], entries[END, i]
    weights = carray(words_at(records[0, layer, expert], words), (2 * width * hidden,))
    bias_at = records[1, layer, expert]
    bias = carray(words_at(bias_at, words), (2 * width if bias_at != 0 else 0,))
    block = GATE_UP_ROWS * (WIDER if columned is not None else 1)
    first = (task - starts[0, i]) * block
    last = min(first + block, entries[SHARE, i])
    if columned is not None:
        gate_up_columns(
            weights, bias, hidden, width, shape[1] != 0, shape[2], numbers[0], numbers[1], first, last,
            x, rows[begin:end], pairs[begin:end], inner, scratch,
        )  # fmt: skip
    if rowed is not None:
        gate_up_rows(
            weights, bias, hidden, width, shape[1] != 0, shape[2], numbers[0], numbers[1], first, last,
            x, rows[begin:end], pairs[begin:end], inner, scratch,
        )  # fmt: skip
    add(ready.ctypes.data + 8 * i, 1)


@compiled
def down_task(
    task: int, base: int, head: Any, entries: Any, pairs: Any, words: Any, out: Any, shape: Any, records: Any,
    sizes: Any, inner: Any, starts: Any, ready: Any, scratch: Any, columned: Any, rowed: Any,
) -> None:  # fmt: skip
    i = _entry_of(starts[1], task, head[HEAD_ENTRIES])
    layer, expert = head[HEAD_LAYER], entries[EXPERT, i]
    width, hidden = sizes[layer], out.shape[1]
    wanted = starts[0, i + 1] - starts[0, i]
    weights_at = records[0, layer, expert] + 4 * width * hidden
    block = DOWN_ROWS * (WIDER if columned is not None else 1)
    first = (task - starts[1, i]) * block
    last = min(first + block, hidden)
    if rowed is not None and load(ready.ctypes.data + 8 * i) < wanted:
        for at in range(weights_at + 2 * width * first, weights_at + 2 * width * last, 64):
            fetch(at)  # other threads still compute its input: memory need not wait for them
    while load(ready.ctypes.data + 8 * i) < wanted:
        if load(base + 8 * STOP) != 0:
            return
        pause()
    weights = carray(words_at(weights_at, words), (width * hidden,))
    bias_at = records[2, layer, expert]
    share = entries[SHARE, i]
    has_bias = bias_at != 0 and share == width  # it comes with the whole sum only
    bias = carray(words_at(bias_at, words), (hidden if has_bias else 0,))
    these = pairs[entries[BEGIN, i] : entries[END, i]]
    if columned is not None:
        down_columns(weights, bias, hidden, share, first, last, inner, these, out, scratch)
    if rowed is not None:
        down_rows(weights, bias, width, share, first, last, inner, these, out, scratch)
