"""Keep of a window what its pass chose too, without the host. Runs no pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.launch import RepeatedLaunch

_BLOCK = 128  # rows of the longest window at least


def accept_tokens(
    start: Tensor, live: Tensor, cursor: Tensor, tokens: Tensor, choices: Tensor,
    following: int, accepted: int | None,
) -> None:  # fmt: skip
    """Go on from a window to the one behind it, as model.device_window.DeviceWindow.go_on says.

    Args:
        start, live, cursor: int64 (1,). tokens: int64 (rows,), the window's.
        choices: int32 (R,), of its pass, with R at least `live`.
    """
    assert len(choices) <= _BLOCK, f"{len(choices)} rows"
    given = -1 if accepted is None else accepted
    kind = (start.device.index,)  # nothing else decides what Triton compiles
    words = start, live, cursor, tokens
    _launch_accept(kind, (1, 1, 1), *words, choices, given, following, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["start", "live", "cursor", "tokens", "choices", "accepted", "following"])
def _accept(start, live, cursor, tokens, choices, accepted, following, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    first, count = tl.load(start), tl.load(live)
    drafted = row + 1 < count
    chosen = tl.load(choices + row, mask=row < count, other=0).to(tl.int64)
    agreed = drafted & (tl.load(tokens + 1 + row, mask=drafted, other=0) == chosen)
    kept = tl.min(tl.where(agreed, BLOCK, row), 0)
    kept = tl.where(accepted < 0, kept, accepted)
    token = tl.sum(tl.where(row == kept, chosen, 0), 0)
    tl.debug_barrier()  # all of it is read before any of it is written
    tl.store(start, first + kept + 1)
    tl.store(live, following.to(tl.int64))
    tl.store(cursor, tl.zeros_like(first))
    tl.store(tokens, token)


_launch_accept = RepeatedLaunch(_accept, num_warps=1)
