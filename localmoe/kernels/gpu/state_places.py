"""Where the state of linear attention stands, in device memory: passes follow each other before the host
knows how many of a window's tokens were kept. Decides nothing.

A window leaves the state where it began, beside what it would take to go on from there (a log of its rows).
The next pass says where it begins itself, and so how many rows of the log come first. Logs have two halves: a
pass reads one and writes the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch

# a pass: of a window whose end is not known yet, of a prompt that is kept whole, of one drafted token
WINDOW, PROMPT, DRAFT = 0, 1, 2

# words of the places
BASE = tl.constexpr(0)  # position of the state
REPLAY = tl.constexpr(1)  # rows of the log that this pass has to go through first
FRESH = tl.constexpr(2)  # whether the text begins with this pass: there is no state before it
READ = tl.constexpr(3)  # half of the log to read, and to write
WRITE = tl.constexpr(4)
DRAFTED = tl.constexpr(5)  # position that the draft's own state is at; -1: none
GOES_ON = tl.constexpr(6)  # whether this draft goes on from there
KEEP = tl.constexpr(
    7
)  # row of the next window or prompt before which the state is to be kept aside; -1: none
KEPT = tl.constexpr(8)  # the same of this one
NUM_WORDS = 9


def new_places(device: torch.device) -> Tensor:
    """int64 words of no text at all."""
    words = torch.zeros(NUM_WORDS, dtype=torch.int64, device=device)
    words[DRAFTED.value] = words[KEEP.value] = words[KEPT.value] = -1
    return words


def keep_before(places: Tensor, row: int) -> None:
    """The next window or prompt keeps its state before that row aside, in stream order."""
    places[KEEP.value].fill_(row)


def go_back(places: Tensor, position: int) -> None:
    """The state is one of that position again, in stream order, and no row of the log is behind it."""
    places[BASE.value].fill_(position)
    places[DRAFTED.value].fill_(-1)


def begin_pass(places: Tensor, at: Tensor, live: Tensor, kind: int, rows: int) -> None:
    """Before the first layer of a pass.

    Args:
        at: int64 (1,), position of its first token; live: int64 (1,), its tokens, of a prompt.
        rows: that a log holds.
    """
    launch(
        _begin_pass, (1,), places, at, live, rows,
        KIND=kind, **after_previous(places.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _begin_pass(places, at, live, rows, KIND: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT, SMALL=True)
    position = tl.load(at)
    replay = position - tl.load(places + BASE)
    # never past the log, whatever the host did wrong
    replay = tl.where(position == 0, 0, tl.minimum(tl.maximum(replay, 0), rows))
    tl.store(places + REPLAY, replay)
    tl.store(places + FRESH, (position == 0).to(tl.int64))
    half = tl.load(places + WRITE)
    tl.store(places + READ, half)
    if KIND == 2:
        tl.store(places + GOES_ON, (tl.load(places + DRAFTED) == position).to(tl.int64))
        tl.store(places + DRAFTED, position + 1)
    else:
        tl.store(places + WRITE, 1 - half)
        tl.store(places + GOES_ON, 0)
        tl.store(places + DRAFTED, -1)
        tl.store(places + BASE, position + tl.load(live) if KIND == 1 else position)
        tl.store(places + KEPT, tl.load(places + KEEP))
        tl.store(places + KEEP, -1)
