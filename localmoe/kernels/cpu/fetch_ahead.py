"""Weights of the expert that is likely to come, fetched into the caches of the threads that will compute with
them, while the GPU works through attention and memory would have nothing to do. Which expert that is says
the mailbox; nothing here changes what is computed.
"""

from __future__ import annotations

from typing import Any

from localmoe.kernels.cpu.atoms import compiled, fetch, load, swap_if
from localmoe.kernels.cpu.bf12_products import codes_of as bf12_codes_of
from localmoe.kernels.cpu.coded_products import codes_of
from localmoe.kernels.cpu.codings import code_bits
from localmoe.kernels.cpu.control import FETCHED, GATE_UP_ROWS, WIDER_CODES
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY

_THREAD_BYTES = 512 << 10  # for each thread: half of a core's own cache, on small processors all of it
_PAGE = 4096


def most_blocks_ahead(column: int, bits: int) -> int:
    """Blocks of gate_up that a thread fetches ahead, of weights of so many bits: 16, 12 (BF12), 8 (FP8),
    4 (MXFP4). column: weights of an inner column, of gate and up together."""
    columns = GATE_UP_ROWS * WIDER_CODES if bits < 16 else GATE_UP_ROWS
    return max(1, _THREAD_BYTES // (columns * column * bits // 8))


blocks_ahead = compiled(most_blocks_ahead)


@compiled
def weight_bits(coded: Any, packed: Any) -> int:
    """Of a weight in the codes. coded, packed: see worker."""
    if packed is not None:
        return 12
    return code_bits(coded) if coded is not None else 16


@compiled
def fetch_ahead(
    me: int, told: int, last: int, posted: int, shape: Any, records: Any, sizes: Any, x: Any, scratch: Any,
    control: Any, coded: Any, packed: Any,
) -> None:  # fmt: skip
    """Bring this thread's blocks of the expert that is likely to come into its cache, until a job comes."""
    layer, expert = (told >> LAYER_SHIFT) & NOBODY, told & NOBODY
    if layer >= records.shape[1] or expert >= records.shape[2] or told >> JOB_SHIFT < last:
        return  # none is likely, or it was said of a job that is over
    control[FETCHED] = told
    hidden, inner = x.shape[1], sizes[layer]
    weights = records[0, layer, expert]
    if weights == 0:
        return  # it is not in RAM
    size = GATE_UP_ROWS if coded is None and packed is None else GATE_UP_ROWS * WIDER_CODES
    for step in range(blocks_ahead(hidden * shape[3], weight_bits(coded, packed))):
        first = (me + step * scratch.shape[0]) * size
        count = min(size, inner - first)
        if count <= 0:
            return
        for part in range(shape[3]):  # where gate and up alternate, one behind the other
            row = 2 * first + part * count if shape[1] != 0 else part * inner + first
            if coded is not None:
                at = weights + codes_of(row, hidden, coded)
                end = at + codes_of(count, hidden, coded)
            elif packed is not None:
                at, end = weights + bf12_codes_of(row, hidden), weights + bf12_codes_of(row + count, hidden)
            else:
                at, end = weights + 2 * row * hidden, weights + 2 * (row + count) * hidden
            for page in range(at, end, _PAGE):
                if load(posted) > last:
                    return
                for line in range(page, min(page + _PAGE, end), 64):
                    fetch(line)


@compiled
def claim(claims: Any, block: int, job: int) -> bool:
    """Whether a block that was fetched ahead is the caller's to compute. A claim is 2 * job until somebody
    has it, then 2 * job + 1, so whoever comes late for an earlier job gets nothing."""
    mine: bool = swap_if(claims.ctypes.data + 8 * block, 2 * job, 2 * job + 1)
    return mine
