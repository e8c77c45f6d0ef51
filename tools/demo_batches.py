"""Batches for the demo model: picks documents by each source's share and packs them into rows.

Every row starts where a document starts and is filled to its end; what does not fit is cut. Shares are of
tokens.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROW = 1024
NO_LOSS = 1 << 15
AHEAD = 8  # batches packed ahead of the trainer


class TokenFile:
    """One prepared token file and the sources it was made of."""

    def __init__(self, folder: Path, stem: str) -> None:
        with np.load(folder / f"{stem}.npz") as held:
            self.tokens: np.ndarray = held["tokens"]
            self.lengths: np.ndarray = held["lengths"].astype(np.int64)
            self.sources: np.ndarray = held["sources"]
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.rows = json.loads((folder / "sources.json").read_text())

    def document(self, index: int) -> np.ndarray:
        """The uint16 entries of one document."""
        return self.tokens[self.starts[index] : self.starts[index] + self.lengths[index]]


class Batches:
    """Endless training batches, or held-out rows by group, of one token file."""

    def __init__(self, file: TokenFile, rows: int, seed: int) -> None:
        self.file, self.rows, self.seed = file, rows, seed

    def _documents(self) -> Iterator[np.ndarray]:
        """Documents for ever, from the source furthest behind its share; each epoch is a new shuffle."""
        rng = np.random.default_rng(self.seed)
        numbers = [n for n in range(len(self.file.rows)) if (self.file.sources == n).any()]
        shares = np.array([self.file.rows[n]["share"] for n in numbers])
        pools = [np.flatnonzero(self.file.sources == n) for n in numbers]
        orders = [rng.permutation(p) for p in pools]
        cursor, used = [0] * len(pools), np.zeros(len(pools))
        while True:
            at = int(np.argmin(used / shares))
            if cursor[at] == len(orders[at]):
                orders[at], cursor[at] = rng.permutation(pools[at]), 0
            document = self.file.document(int(orders[at][cursor[at]]))
            cursor[at] += 1
            used[at] += len(document)
            yield document

    def _fill(self, rows: np.ndarray, documents: Iterator[np.ndarray]) -> bool:
        """Fills (rows, ROW + 1) in place; False where the documents ran out first."""
        for row in rows:
            at = 0
            while at < len(row):
                if (document := next(documents, None)) is None:
                    return False
                part = document[: len(row) - at]
                row[at : at + len(part)] = part
                at += len(part)
        return True

    @staticmethod
    def _tensors(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and labels (rows, ROW); labels that carry no loss are -100."""
        entries = torch.from_numpy(rows.astype(np.int64))
        ids = entries & (NO_LOSS - 1)
        labels = torch.where(entries >= NO_LOSS, -100, ids)
        return ids[:, :-1].contiguous(), labels[:, 1:].contiguous()

    def stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches, packed ahead by a daemon thread."""
        ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(AHEAD)

        def work() -> None:
            documents = self._documents()
            while True:
                rows = np.zeros((self.rows, ROW + 1), np.uint16)
                self._fill(rows, documents)
                ready.put(self._tensors(rows))

        threading.Thread(target=work, daemon=True).start()
        while True:
            yield ready.get()

    def groups(self, max_rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """At most `max_rows` rows of each group of the card, in file order; unfilled places carry no loss."""
        names = [row["group"] for row in self.file.rows]
        for group in dict.fromkeys(names):
            members = [i for i in range(len(self.file.sources)) if names[self.file.sources[i]] == group]
            total = int(self.file.lengths[members].sum())
            rows = np.full((min(max_rows, -(-total // (ROW + 1))), ROW + 1), NO_LOSS, np.uint16)
            self._fill(rows, (self.file.document(i) for i in members))
            yield group, *self._tensors(rows)
