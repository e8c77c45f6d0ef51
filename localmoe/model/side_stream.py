"""A second stream for work that does not depend on what the first one waits for. Knows neither kind of work.

What runs inside `with side:` starts after all that was issued before, and runs beside what is issued next;
`join` lets what comes after it wait. In a captured graph this makes two branches. Tensors made inside are
safe to use after `join`: the next work on the second stream, which may use their memory again, starts after
all that the first one was given until then.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

MOST_BESIDE = 128  # rows; a prompt's would hold memory that the first stream cannot use again


class _Forked(threading.local):
    """Of the thread that issues a pass: what waits for its join."""

    def __init__(self) -> None:
        self.sides: set[SideStream] = set()


_forked = _Forked()


def beside(side: SideStream, rows: int) -> AbstractContextManager[object]:
    """`with side:` for a pass of so few rows that it pays; for a longer one the first stream."""
    return side if rows <= MOST_BESIDE else nullcontext()


class SideStream:
    """One second stream of a device; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> SideStream:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            _forked.sides.add(self)
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, trace)
            self._inside = None

    def join(self) -> None:
        """What is issued from here on starts after what ran inside, if anything did."""
        if self._stream is not None and self in _forked.sides:
            _forked.sides.remove(self)
            torch.cuda.current_stream().wait_stream(self._stream)


def join_forked() -> None:
    """What a pass began beside, and did not join as it failed. A capture cannot end while a branch of it is
    open, nor join one that began before it."""
    for side in list(_forked.sides):
        side.join()
