"""A thread of the CPU lane: waits for jobs in a mailbox and computes its share of them, outside Python's
lock. Chooses no experts.

A job's experts are cut into blocks of gate_up, then blocks of down; threads draw blocks from one counter. The
counter carries the job's number, so a thread that comes late finds nothing to draw; a block of down waits for
its expert's gate_up. The thread that ends the last block answers.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from numba import carray, njit

from localmoe.kernels.cpu.atoms import (
    CAN_NAP,
    add,
    compiled,
    fetch,
    held,
    load,
    nap,
    pause,
    store,
    swap_if,
    ticks,
    words_at,
)
from localmoe.kernels.cpu.products import down_columns, down_rows, gate_up_columns, gate_up_rows
from localmoe.kernels.mailbox import (
    BEGIN,
    END,
    EXPERT,
    HEAD_ENTRIES,
    HEAD_LAYER,
    HEAD_PAIRS,
    HEAD_TOKENS,
    SHARE,
)

# words of the control memory, each in a cache line of its own
_LINE = 16
OWNER, TICKET, FINISHED, STOP, HOLD = (_LINE * i for i in range(5))
TASKS_A, TASKS_B, STARTED = (_LINE * 5 + i for i in range(3))  # of the job; written before its ticket
JOBS, BUSY_TICKS, DONE_BYTES = (_LINE * 6 + i for i in range(3))  # totals, written before a job's answer
CONTROL_WORDS = _LINE * 7

STOPPED, PARKED = 0, 1
GATE_UP_ROWS = 8  # inner columns of a block: small ones end together on all threads
DOWN_ROWS = 16
WIDER = 8  # times as many columns where weights are transposed, since a block reads a piece of every row
_SEQUENCE_SHIFT = 24
_DRAWN = (1 << _SEQUENCE_SHIFT) - 1
_NAP_US = 30


@compiled
def _work(
    me: int, spin_ticks: int, park_ticks: int, control: Any, posted: int, answered: int,
    head: Any, entries: Any, pairs: Any, words: Any, out: Any,
    shape: Any, numbers: Any, records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any,
    ready: Any, scratch: Any, columned: Any, rowed: Any,
) -> int:  # fmt: skip
    """Work until told to stop, or until nothing was posted for `park_ticks` while the HOLD word was 0.

    Args:
        me: this thread's number.
        control: int64 (CONTROL_WORDS,). posted, answered: addresses of the mailbox's words.
        head, entries, pairs, words, out: the mailbox. `words` (T, H) also tells the kind of 16-bit float.
        shape: int64: K, interleaved, activation kind. numbers: float32: alpha, limit.
        records: int64 (3, L, E): addresses of an expert's gate_up, of its biases of gate_up and of down (0:
            none).
        sizes: int64 (L,): inner size I of each layer.
        x, inner: (T, H), (P, I), of products.activations_kind. rows: int32 (P,). starts: int64 (2, A + 1).
        ready: int64 (A,).
        scratch: float32 (threads, 4, n).
        columned, rowed: a number if weights are transposed, or if not; None for the other, whose code is not
            compiled.

    Returns:
        STOPPED or PARKED.
    """
    base = control.ctypes.data
    last = load(answered)
    quiet = ticks()
    while load(base + 8 * STOP) == 0:
        job = load(posted)
        if job > last:
            _job(
                me, job, base, answered, head, entries, pairs, words, out, shape, numbers, records, sizes,
                x, inner, rows, starts, ready, scratch, columned, rowed, control,
            )  # fmt: skip
            last = job
            quiet = ticks()
            continue
        waited = ticks() - quiet
        if waited > park_ticks and load(base + 8 * HOLD) == 0:
            return PARKED
        if CAN_NAP and waited > spin_ticks and load(base + 8 * HOLD) == 0:
            nap(_NAP_US)
        else:
            for _ in range(8):
                pause()
    return STOPPED


@compiled
def _job(
    me: int, job: int, base: int, answered: int, head: Any, entries: Any, pairs: Any, words: Any, out: Any,
    shape: Any, numbers: Any, records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any,
    ready: Any, scratch: Any, columned: Any, rowed: Any, control: Any,
) -> None:  # fmt: skip
    owner = load(base + 8 * OWNER)
    if owner < job and swap_if(base + 8 * OWNER, owner, job):
        _prepare(
            base, head, entries, pairs, words, shape, sizes, x, rows, starts, ready, columned, rowed, control
        )
        store(base + 8 * TICKET, job << _SEQUENCE_SHIFT)
    while True:
        ticket = load(base + 8 * TICKET)
        if ticket >> _SEQUENCE_SHIFT < job:  # its owner still prepares it
            if load(base + 8 * STOP) != 0:
                return
            pause()
            continue
        drawn = ticket & _DRAWN
        if ticket >> _SEQUENCE_SHIFT > job or drawn >= control[TASKS_A] + control[TASKS_B]:
            return
        if not swap_if(base + 8 * TICKET, ticket, ticket + 1):
            continue
        if drawn < control[TASKS_A]:
            _gate_up_task(
                drawn, base, head, entries, pairs, words, shape, numbers, records, sizes, x, inner, rows,
                starts, ready, scratch[me], columned, rowed,
            )  # fmt: skip
        else:
            _down_task(
                drawn - control[TASKS_A], base, head, entries, pairs, words, out, shape, records, sizes,
                inner, starts, ready, scratch[me], columned, rowed,
            )  # fmt: skip
            if add(base + 8 * FINISHED, 1) + 1 == control[TASKS_B]:
                control[JOBS] += 1
                control[BUSY_TICKS] += ticks() - control[STARTED]
                store(answered, job)


@compiled
def _prepare(
    base: int, head: Any, entries: Any, pairs: Any, words: Any, shape: Any, sizes: Any, x: Any, rows: Any,
    starts: Any, ready: Any, columned: Any, rowed: Any, control: Any,
) -> None:  # fmt: skip
    """Cut the job into blocks, and convert its activations. Only the job's owner comes here."""
    control[STARTED] = ticks()
    layer, hidden = head[HEAD_LAYER], x.shape[1]
    inner = sizes[layer]
    num_bytes = 0
    wider = WIDER if columned is not None else 1
    for i in range(head[HEAD_ENTRIES]):
        share = entries[SHARE, i]
        starts[0, i + 1] = starts[0, i] + (share + GATE_UP_ROWS * wider - 1) // (GATE_UP_ROWS * wider)
        starts[1, i + 1] = starts[1, i] + (hidden + DOWN_ROWS * wider - 1) // (DOWN_ROWS * wider)
        num_bytes += 6 * hidden * min(share, inner)  # gate, up and down, of 2 bytes a weight
        store(ready.ctypes.data + 8 * i, 0)
    control[TASKS_A] = starts[0, head[HEAD_ENTRIES]]
    control[TASKS_B] = starts[1, head[HEAD_ENTRIES]]
    control[DONE_BYTES] += num_bytes
    for p in range(head[HEAD_PAIRS]):
        rows[p] = pairs[p] // shape[0]
    for t in range(head[HEAD_TOKENS]):
        for k in range(hidden):
            x[t, k] = held(words[t, k], x)
    store(base + 8 * FINISHED, 0)


@compiled
def _entry_of(starts: Any, task: int, count: int) -> int:
    for i in range(count):
        if task < starts[i + 1]:
            return i
    return 0


@compiled
def _gate_up_task(
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
def _down_task(
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


def _compiled_once(sources: int) -> Any:
    """The entry to the compiled code, which numba keeps on disk for the next start. numba looks for
    changes of one file only; a number that stands for all `sources` makes it look at theirs."""

    @njit(nogil=True, cache=True)
    def run(*arguments: Any) -> int:
        result: int = _work(*arguments) if sources >= 0 else STOPPED
        return result

    return run


def _sources() -> int:
    """A number that changes with any file that the compiled code comes from."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "mailbox.py"]
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


run = _compiled_once(_sources())  # takes what _work takes


@njit
def now() -> int:
    """The clock that `spin_ticks` and `park_ticks` are counted by."""
    count: int = ticks()
    return count
