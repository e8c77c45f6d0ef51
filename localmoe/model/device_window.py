"""The few numbers that a step reads on the device, so that one captured graph serves every step. Decides
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.mirror import Mirror


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A long pass of layers that keep a ring of positions: what its rows see, in order, from `base` on.

    Attributes:
        base: the first position, at which sections of attention begin.
        before: positions from there to the pass's first row.
        start: int64 (1,), the same number.
        rows: of the pass.
        kept: of those, the last ones, which the ring keeps.
        kept_at: int64 (1,), position of the first of them.
    """

    base: int
    before: int
    start: Tensor
    rows: int
    kept: int
    kept_at: Tensor

    @property
    def length(self) -> int:
        """Positions."""
        return self.before + self.rows

    def join(self, ring: Tensor, new: Tensor) -> Tensor:
        """(1, heads, length, D): a ring (1, heads, C, D) before anything is written, and the pass's rows."""
        capacity = ring.shape[2]
        first = self.base % capacity
        to_the_end = min(self.before, capacity - first)
        parts = ring[:, :, first : first + to_the_end], ring[:, :, : self.before - to_the_end]
        return torch.cat((*parts, new), dim=2)


class DeviceWindow:
    """Where the pass stands, how many of its rows count, and the tokens of the window.

    Attributes:
        start: int64 (1,), position of the window's first token.
        live: int64 (1,), tokens of the window; rows after them are padding.
        cursor: int64 (1,), window token that the draft is at.
        tokens: int64 (rows,), the last accepted token, then the drafted ones.
        at: int64 (1,), position of the first row of the pass that runs.
        visible: cache positions that the pass may look at, a number on the host.
        until: int32 (T,), of a pass with pictures whose tokens see each other where layers see a window: up
            to which row each sees; None in all others.
        unrolled: where layers with a ring find what a prompt's pass sees that is longer than their room; None
            where they have it.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._mirror = Mirror(3 + rows, device)
        words = self._mirror.words
        self.start, self.live, self.cursor, self.tokens = words[0:1], words[1:2], words[2:3], words[3:]
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.visible = 0
        self.until: Tensor | None = None
        self.unrolled: Unrolled | None = None
        self.rows = rows

    def set(self, start: int, live: int, tokens: Sequence[int]) -> None:
        """Upload, in stream order; see kernels.mirror for when."""
        host = self._mirror.host
        host[:3] = start, live, 0
        host[3 : 3 + len(tokens)] = tokens
        self._mirror.upload()

    def resize(self, live: int) -> None:
        """Other than `set` said, so many tokens count, in stream order."""
        self.live.fill_(live)

    def numbers(self, rows: int) -> Tensor:
        """int32 (3 + rows,): start, live, cursor, and as many tokens."""
        return self._mirror.words[: 3 + rows].int()

    def advance(self, token: Tensor) -> None:
        """Go on by one token, (1,) on the device, in stream order: as `go_on` where nothing was drafted, for
        less of the host's time."""
        self.start.add_(1)
        self.tokens[:1].copy_(token)

    def go_on(self, choices: Tensor, following: int, accepted: int | None = None) -> None:
        """Behind the window's pass, in stream order: the tokens that it chose too are kept, and its choice
        after them begins a window of which `following` tokens will count.

        Args:
            choices: int32 (R,), the token after each of the window's, and of what else the pass ran.
            accepted: so many drafted tokens are kept, whatever was chosen.
        """
        if choices.is_cuda:
            from localmoe.kernels.gpu.acceptance import accept_tokens

            accept_tokens(self.start, self.live, self.cursor, self.tokens, choices, following, accepted)
            return
        drafted = max(0, int(self.live) - 1)
        if accepted is None:
            accepted = int((self.tokens[1 : 1 + drafted] == choices[:drafted]).long().cumprod(0).sum())
        self.start.add_(accepted + 1)
        self.live.fill_(following)
        self.cursor.zero_()
        self.tokens[:1].copy_(choices[accepted : accepted + 1])
