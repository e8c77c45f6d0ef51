"""Activations as the processor's matrix unit takes them (matrix_unit): 16 rows beside each other, word by
word. Those that come in are gathered by each thread for itself, which keeps them, since the blocks that it
draws next are mostly of the same expert; what gate_up puts out lies so for all threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.atoms import compiled, load, store
from localmoe.kernels.cpu.matrix_unit import ROW_BYTES, SIDE, TILE_BYTES
from localmoe.kernels.cpu.vector_loops import I8, I32, I64, LINE, const, load_at, loop

SUMS_ROWS, SUMS_TOKENS = 32, 4 * SIDE  # of float32 sums that a thread has room for
_HEAD, _SUMS = LINE, 4 * SUMS_ROWS * SUMS_TOKENS
_LEAST_ROOM = 1 << 20  # bytes for rows: 256 of 2,048 numbers
_WORDS = ir.VectorType(I32, SIDE)
_JOB, _WHAT = 0, 8  # bytes of the head: what the rows are that lie there


def room_words(width: int) -> int:
    """int64 words that a thread needs for rows of up to so many numbers."""
    return (LINE + _HEAD + _SUMS + max(_LEAST_ROOM, 2 * SIDE * width)) // 8


def shared_words(pairs: int, entries: int, width: int) -> int:
    """int64 words for a job's rows of gate_up, of so many numbers: each expert's begin a group."""
    return (LINE + 2 * width * (pairs + SIDE * entries)) // 8


@compiled
def _aligned(memory: Any) -> int:
    at: int = (memory.ctypes.data + LINE - 1) // LINE * LINE
    return at


@compiled
def shared_at(shared: Any, begin: int, entry: int, width: int) -> int:
    """Address of the groups of a job's expert, whose pairs begin at `begin`, of rows of `width` numbers; one
    group after the other, (width / 2, 16) words of 32 bits each. shared: see shared_words."""
    at: int = _aligned(shared) + 2 * width * (begin + SIDE * entry)
    return at


@compiled
def sums_at(room: Any) -> int:
    """Address of a thread's float32 sums, (SUMS_ROWS, SUMS_TOKENS)."""
    at: int = _aligned(room) + _HEAD
    return at


@compiled
def groups_of(rows: int) -> int:
    """Of up to 16 rows each."""
    groups: int = (rows + SIDE - 1) // SIDE
    return groups


@compiled
def most_groups(room: Any, words: int) -> int:
    """That a thread has room for, of rows of so many words: 1 or more."""
    groups: int = (8 * room.shape[0] - LINE - _HEAD - _SUMS) // (ROW_BYTES * words)
    return groups


@compiled
def gathered(room: Any, job: int, what: int, x: Any, rows: Any, words: int) -> int:
    """Address of groups of 16 rows x[rows[i]], each (words, 16) words of 32 bits; the last row fills up the
    last one. They stay until something else is gathered.

    Args:
        room: int64 words of this thread's own, see room_words. job, what: these are the same rows as before
            if both are.
        x: of 16-bit words. rows: int32, as many as most_groups allow. words: of a row, the first ones;
            a multiple of 16.
    """
    at = _aligned(room)
    into: int = at + _HEAD + _SUMS
    if load(at + _JOB) != job or load(at + _WHAT) != what:
        _gather(x.ctypes.data, x.strides[0], rows.ctypes.data, rows.shape[0], words, into)
        store(at + _JOB, job)
        store(at + _WHAT, what)
    return into


@intrinsic
def _gather(context: Any, base: Any, pitch: Any, rows: Any, count: Any, words: Any, into: Any) -> Any:
    """base, pitch: address of x and its bytes a row. rows: address of `count` int32 numbers of rows."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        b = builder
        base, pitch, rows, count, words, into = arguments
        tiles = b.lshr(words, const(4))

        def group(first: Any, _: list[Any]) -> list[Any]:
            sources = group_rows(b, base, pitch, rows, first, count)
            target = b.add(into, b.mul(first, b.mul(tiles, const(ROW_BYTES))))

            def turn(tile: Any, _: list[Any]) -> list[Any]:
                begin = b.mul(tile, const(ROW_BYTES))
                vectors = [load_at(b, b.add(source, begin), _WORDS, 2) for source in sources]
                to = b.add(target, b.mul(tile, const(TILE_BYTES)))
                for i, vector in enumerate(turned(b, vectors)):
                    place = b.inttoptr(b.add(to, const(i * ROW_BYTES)), _WORDS.as_pointer())
                    b.store(vector, place).align = LINE
                return []

            loop(b, const(0), tiles, 1, [], turn)
            return []

        loop(b, const(0), count, SIDE, [], group)
        return ir.Constant(I8, 0)

    return types.int8(*[types.int64] * 6), generate


def group_rows(builder: Any, base: Any, pitch: Any, rows: Any, first: Any, count: Any) -> list[Any]:
    """Addresses of rows `first` to `first` + 15 of those whose int32 numbers lie at `rows`; of the last of
    `count` where there are no more. base, pitch: of row 0, and bytes to the next one."""
    b, found = builder, []
    last = b.sub(count, const(1))
    for i in range(SIDE):
        wanted = b.add(first, const(i))
        wanted = b.select(b.icmp_signed("<", wanted, last), wanted, last)
        row = load_at(b, b.add(rows, b.shl(wanted, const(2))), I32, 4)
        found.append(b.add(base, b.mul(b.sext(row, I64), pitch)))
    return found


def turned(builder: Any, vectors: list[Any]) -> list[Any]:
    """The transpose of 16 vectors of 16 numbers: blocks that lie across are exchanged, of one number, of two,
    of four, of eight."""
    found = list(vectors)
    for size in (1, 2, 4, 8):
        low = [j if not j & size else SIDE + (j ^ size) for j in range(SIDE)]
        high = [j | size if not j & size else SIDE + j for j in range(SIDE)]
        masks = [ir.Constant(ir.VectorType(I32, SIDE), order) for order in (low, high)]
        for i in range(SIDE):
            if not i & size:
                pair = found[i], found[i + size]
                found[i], found[i + size] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    return found
