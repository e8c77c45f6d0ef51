"""Read records of a file into memory by some threads, past the system's own cache where that can be: what is
worth keeping in RAM is decided here, not there. Decides nothing about what is read.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from localmoe.core.errors import DiskError
from localmoe.experts.records import PAGE_BYTES

_THREADS = 8  # reads under way: an SSD is fastest with some
_PIECE_BYTES = 2 << 20  # of a record that one thread reads


class DiskReader:
    """Of one file; `close` ends the threads."""

    def __init__(self, path: Path, threads: int = _THREADS) -> None:
        """Opens it now: whoever deletes or replaces it later changes nothing of what is read.

        Raises:
            DiskError: it cannot be opened.
        """
        self._path = path
        self._files: list[FileIO] = []
        try:
            self._open(threads)
        except OSError as error:
            self._close_files()
            raise self._unreadable(error) from error
        self._free: SimpleQueue[FileIO] = SimpleQueue()  # a thread's: each is read at one place
        for file in self._files:
            self._free.put(file)
        self._threads = ThreadPoolExecutor(threads, "localmoe-disk")

    def read(self, offset: int, memory: Tensor) -> Future[None]:
        """Fill `memory`, uint8 in whole pages, from there on, by several threads if it is large.

        The future raises DiskError: the file has fewer bytes, or cannot be read. RuntimeError: it was closed.
        """
        pieces = [
            self._threads.submit(self._read, offset + start, memory[start : start + _PIECE_BYTES])
            for start in range(0, len(memory), _PIECE_BYTES)
        ]
        return pieces[0] if len(pieces) == 1 else _all_of(pieces)

    def _read(self, offset: int, memory: Tensor) -> None:
        file = self._free.get_nowait()
        try:
            self._fill(file, offset, memory)
        except OSError as error:
            raise self._unreadable(error) from error
        finally:
            self._free.put(file)

    def _fill(self, file: FileIO, offset: int, memory: Tensor) -> None:
        view = memory.numpy().data
        while view:
            file.seek(offset)
            count = file.readinto(view)
            if not count:
                raise DiskError(
                    f"The experts' file {self._path} is shorter than it was: load the model again, which "
                    "writes it anew."
                )
            view, offset = view[count:], offset + count

    def _unreadable(self, error: OSError) -> DiskError:
        return DiskError(
            f"The experts' file {self._path} cannot be read ({error.strerror or error}): delete it and "
            "load the model again, which writes it anew."
        )

    def _open(self, count: int) -> None:
        direct = hasattr(os, "O_DIRECT")
        while len(self._files) < count:
            try:
                self._files.append(FileIO(self._path, opener=_open_directly if direct else None))
                if direct:
                    self._files[-1].readinto(mmap.mmap(-1, PAGE_BYTES))  # which begins with a page
            except OSError:
                if not direct:
                    raise
                direct = False  # this disk does not do that
                self._close_files()

    def close(self) -> None:
        """Reads that have not begun are not made."""
        self._threads.shutdown(cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()


def _all_of(pieces: list[Future[None]]) -> Future[None]:
    """Ends with the last of them, with the error of one if there was any."""
    whole: Future[None] = Future()
    left, lock = [len(pieces)], threading.Lock()

    def ended(piece: Future[None]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        if any(piece.cancelled() for piece in pieces):
            whole.cancel()
            whole.set_running_or_notify_cancel()
            return
        errors = [error for piece in pieces if (error := piece.exception()) is not None]
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(None)

    for piece in pieces:
        piece.add_done_callback(ended)
    return whole


def _open_directly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT)
