"""Weights of the expert that is likely to come, fetched into the caches of the threads that will compute with
them, while the GPU works through attention and memory would have nothing to do. Which expert that is says
the mailbox; nothing here changes what is computed.
"""

from __future__ import annotations

from typing import Any

from localmoe.kernels.cpu.atoms import compiled, fetch, load, swap_if
from localmoe.kernels.cpu.control import FETCHED, GATE_UP_ROWS
from localmoe.kernels.mailbox import JOB_SHIFT, LAYER_SHIFT, NOBODY

_THREAD_BYTES = 512 << 10  # for each thread: half of a core's own cache, on small processors all of it
_PAGE = 4096


def most_blocks_ahead(hidden: int) -> int:
    """Blocks of gate_up that a thread fetches ahead."""
    return max(1, _THREAD_BYTES // (4 * GATE_UP_ROWS * hidden))


blocks_ahead = compiled(most_blocks_ahead)


@compiled
def fetch_ahead(
    me: int, told: int, last: int, posted: int, shape: Any, records: Any, sizes: Any, x: Any, scratch: Any,
    control: Any,
) -> None:  # fmt: skip
    """Bring this thread's blocks of the expert that is likely to come into its cache, until a job comes."""
    layer, expert = (told >> LAYER_SHIFT) & NOBODY, told & NOBODY
    if layer >= records.shape[1] or expert >= records.shape[2] or told >> JOB_SHIFT < last:
        return  # none is likely, or it was said of a job that is over
    control[FETCHED] = told
    hidden, inner = x.shape[1], sizes[layer]
    row = 2 * hidden  # bytes
    weights = records[0, layer, expert]
    for step in range(blocks_ahead(hidden)):
        first = (me + step * scratch.shape[0]) * GATE_UP_ROWS
        count = min(GATE_UP_ROWS, inner - first)
        if count <= 0:
            return
        for part in range(2):
            if shape[1] != 0:  # gate and up alternate
                at = weights + (2 * first + part * count) * row
            else:
                at = weights + (part * inner + first) * row
            for page in range(at, at + count * row, _PAGE):
                if load(posted) > last:
                    return
                for line in range(page, min(page + _PAGE, at + count * row), 64):
                    fetch(line)


@compiled
def claim(claims: Any, block: int, job: int) -> bool:
    """Whether a block that was fetched ahead is the caller's to compute. A claim is 2 * job until somebody
    has it, then 2 * job + 1, so whoever comes late for an earlier job gets nothing."""
    mine: bool = swap_if(claims.ctypes.data + 8 * block, 2 * job, 2 * job + 1)
    return mine
