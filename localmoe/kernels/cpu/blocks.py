"""What is done first for a job of the CPU lane: cutting it into blocks, which one thread does while the
others wait for the ticket that it puts out (worker); and converting what comes in, which all do where it is
much.
"""

from __future__ import annotations

from typing import Any

from localmoe.kernels.cpu.absent import absent_last
from localmoe.kernels.cpu.atoms import add, compiled, held, store, ticks, value
from localmoe.kernels.cpu.bf12_products import raised
from localmoe.kernels.cpu.bf12_vectors import place as bf12_place
from localmoe.kernels.cpu.codings import place
from localmoe.kernels.cpu.control import (
    AHEAD_BLOCKS,
    AHEAD_COLUMNS,
    AHEAD_FIRST,
    CONVERTED,
    DONE_BYTES,
    FETCHED,
    FINISHED,
    MAY_USE_UNIT,
    STARTED,
    TASKS_A,
    TASKS_B,
    TASKS_X,
    THREADS,
    USES_UNIT,
    X_ROWS,
)
from localmoe.kernels.cpu.fetch_ahead import blocks_ahead, weight_bits
from localmoe.kernels.cpu.tasks import down_size, gate_up_size, weight_bytes
from localmoe.kernels.mailbox import (
    BEGIN,
    END,
    EXPERT,
    HEAD_ENTRIES,
    HEAD_LAYER,
    HEAD_TOKENS,
    LAYER_SHIFT,
    NOBODY,
    SHARE,
)


@compiled
def prepare(
    job: int, base: int, head: Any, entries: Any, pairs: Any, words: Any, shape: Any, records: Any,
    sizes: Any, x: Any, rows: Any, starts: Any, ready: Any, claims: Any, threads: int, columned: Any,
    rowed: Any, coded: Any, packed: Any, control: Any,
) -> None:  # fmt: skip
    """Cut the job into blocks, and convert few activations. Only the job's owner comes here."""
    control[STARTED] = ticks()
    control[THREADS] = threads
    control[TASKS_X] = 0
    control[USES_UNIT] = control[MAY_USE_UNIT]  # all blocks have to agree on it
    layer, hidden = head[HEAD_LAYER], x.shape[1]
    if layer < 0:  # of no experts: whoever posted it has cut it
        control[TASKS_A] = control[AHEAD_FIRST] = control[AHEAD_BLOCKS] = 0
        control[TASKS_B] = head[HEAD_ENTRIES]
        store(base + 8 * FINISHED, 0)
        return
    absent_last(job, base, head, entries, records)
    inner = sizes[layer]
    num_weights = 0
    columns, down_rows = gate_up_size(columned, coded, packed), down_size(columned, coded)
    fetched = control[FETCHED]
    control[FETCHED] = NOBODY
    control[AHEAD_FIRST] = control[AHEAD_BLOCKS] = 0
    for i in range(head[HEAD_ENTRIES]):
        share = entries[SHARE, i]
        starts[0, i + 1] = starts[0, i] + (share + columns - 1) // columns
        starts[1, i + 1] = starts[1, i] + (hidden + down_rows - 1) // down_rows
        num_weights += (shape[3] + 1) * hidden * min(share, inner)  # of gate, up and down
        store(ready.ctypes.data + 8 * i, 0)
        if fetched & NOBODY == entries[EXPERT, i] and (fetched >> LAYER_SHIFT) & NOBODY == layer:
            control[AHEAD_FIRST], control[AHEAD_COLUMNS] = starts[0, i], share
            most = threads * blocks_ahead(hidden * shape[3], weight_bits(coded, packed))
            control[AHEAD_BLOCKS] = min(starts[0, i + 1] - starts[0, i], most)
    for block in range(control[AHEAD_BLOCKS]):
        store(claims.ctypes.data + 8 * block, 2 * job)
    control[TASKS_A] = starts[0, head[HEAD_ENTRIES]]
    control[TASKS_B] = starts[1, head[HEAD_ENTRIES]]
    control[DONE_BYTES] += weight_bytes(num_weights, coded, packed)
    wanted = ready[entries.shape[1] :]
    for i in range(head[HEAD_ENTRIES]):
        for p in range(entries[BEGIN, i], entries[END, i]):
            rows[p] = pairs[p] // shape[0]
            wanted[rows[p]] = job
    tokens = head[HEAD_TOKENS]
    if x.ctypes.data != words.ctypes.data:  # else they are read where they lie
        if tokens >= 2 * X_ROWS and control[AHEAD_BLOCKS] == 0:
            store(base + 8 * CONVERTED, 0)
            control[TASKS_X] = (tokens + X_ROWS - 1) // X_ROWS
        else:
            _convert(0, tokens, job, words, x, wanted, coded, packed)
    store(base + 8 * FINISHED, 0)


@compiled
def convert_task(
    task: int, job: int, base: int, head: Any, entries: Any, words: Any, x: Any, ready: Any, coded: Any,
    packed: Any,
) -> None:  # fmt: skip
    """One block of a job's rows."""
    first, wanted = task * X_ROWS, ready[entries.shape[1] :]
    _convert(first, min(first + X_ROWS, head[HEAD_TOKENS]), job, words, x, wanted, coded, packed)
    add(base + 8 * CONVERTED, 1)


@compiled
def _convert(
    first: int, last: int, job: int, words: Any, x: Any, wanted: Any, coded: Any, packed: Any
) -> None:
    """Rows that the job computes with, as its products take them. wanted: the last job that does so with
    each."""
    for t in range(first, last):
        if wanted[t] != job:
            continue
        for k in range(x.shape[1]):
            if coded is not None:
                x[t, place(k, x, coded)] = held(words[t, k], x)
            elif packed is not None:
                x[t, bf12_place(k, x)] = raised(value(words[t, k]), words[t, k], x)
            else:
                x[t, k] = held(words[t, k], x)
