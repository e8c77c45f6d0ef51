"""Load a model whose experts lie in a file on the disk: the file is written by the first load, beside the
model's drafts, and later ones read but what lies around the experts. Decides nothing; see experts.disk_store.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from localmoe.core.errors import LoadCancelledError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.host_memory import embedding_table
from localmoe.experts.host_store import HostStore
from localmoe.experts.record_file import RecordFile
from localmoe.experts.record_store import RecordStore
from localmoe.hub.unfinished_records import remove_all_leftovers


def load_from_disk(
    file: RecordFile,
    ram_experts: int,
    embedding: tuple[int, int] | None,
    fill_all: Callable[[Callable[[int], mmap.mmap]], HostStore],
    fill_shared: Callable[[RecordStore], None] | None,
    *,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> DiskStore:
    """The store of a model that is filled now.

    Args:
        embedding: shape of the table that lies beside the experts, if one does.
        fill_all: fills the model, and a store of records in the memory that it is given.
        fill_shared: fills all but the experts, with a store that has the table; None: the file is that of
            this load alone.

    Raises:
        DiskError: the file cannot be written, or not be read. LoadCancelledError: `cancel` was set. And as
            the two raise.
    """
    remove_all_leftovers()
    if fill_shared is not None and file.is_whole():
        table = None if embedding is None else embedding_table(embedding, file.dtype)
        store = DiskStore(file, ram_experts, table)
        try:
            fill_shared(store)
        except BaseException:
            store.close()
            raise
        return store

    def told(done: int) -> None:
        if cancel is not None and cancel.is_set():
            raise LoadCancelledError("Loading the model was cancelled.")
        if progress is not None:
            progress(Progress("Writing the experts' file", done, file.num_bytes, "bytes"))

    with file.written(told) as memory:
        written = fill_all(memory)
        table = written.embedding
        written.close()
    keep = fill_shared is not None
    try:
        return DiskStore(file, ram_experts, table, keep=keep)
    except BaseException:
        if not keep:
            file.path.unlink(missing_ok=True)
        raise
