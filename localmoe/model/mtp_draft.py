"""Drafting by the layer that a model was trained with to predict one token more (multi-token prediction):
follows the text of the target, whose passes leave what the layer goes on from, and tells what comes next.
Chooses no tokens, and does not know which experts the target will use.

An entry of the layer's cache is a token and what the target computed before it. Behind the target's last pass
the layer goes on from what it computed itself, of which nothing is kept once the target has passed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.core.errors import UnsupportedModelError, sentence_of
from localmoe.core.shared_length import shared_length
from localmoe.hardware.needs import PREFILL_CHUNK, kv_positions
from localmoe.model.host_linear import HostLinears
from localmoe.model.kv_cache import KVCache
from localmoe.model.mtp_layer import MtpLayer

_WAITING = 64  # rows of the target's passes that are kept until somebody drafts


@dataclass(frozen=True, slots=True)
class MtpTarget:
    """What the layer shares with the target.

    Attributes:
        model: whose input embedding and output head are the layer's too.
        linears: what its linear layers share where they keep 16-bit weights.
    """

    model: Any
    linears: HostLinears | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """(T, H) of int64 (T,)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens[None])[0]
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 (T, V) of (T, H)."""
        if self.linears is not None:
            self.linears.begin_pass(len(hidden), 0)
        out: Tensor = self.model.get_output_embeddings()(hidden)
        return out.float()


@dataclass(frozen=True, slots=True)
class MtpFacts:
    """What a drafter asks of a model that drafts, see DraftModelShape."""

    name: str
    vocab_size: int
    max_context: int


class MtpDraft:
    """The layer, and how far it has followed the text (model.final_hidden.HiddenListener)."""

    def __init__(self, facts: MtpFacts, layer: MtpLayer, target: MtpTarget, context: int) -> None:
        """context: most tokens of a text."""
        self.shape = facts
        self._layer, self._target = layer, target
        # transformers' attention takes one token without a mask, so it must be given no more than was written
        self._cache = KVCache.of_model(layer.text_config, kv_positions(context), block=1)
        self._text: list[int] = []
        self._entries: list[int] = []  # places in the text of the tokens that the cache has, ascending
        self._rows: list[tuple[int, Tensor]] = []  # (place, (T, H)): of the target, and not entered yet
        self._own: Tensor | None = None  # (1, H), what the layer made of the last entry

    @property
    def num_bytes(self) -> int:
        """Device bytes of weights and cache."""
        return self._layer.num_bytes + self._cache.num_bytes

    @property
    def module(self) -> nn.Module:
        """Its layer."""
        layer: nn.Module = self._layer.model
        return layer

    def expect(self, text: Sequence[int]) -> None:
        """The target's next passes are of this text, of which it may hold a prefix."""
        self._drop(shared_length(self._text, text))
        self._text = list(text)

    @torch.inference_mode()
    def hear(self, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        """See HiddenListener."""
        if start > len(self._text):  # nobody said what lies before it
            self.forget()
            self._text = [-1] * start
        known = self._text[start : start + len(tokens)]
        if known != tokens[: len(known)]:
            self.expect([*self._text[:start], *tokens])
        elif len(known) < len(tokens):
            self._text += tokens[len(known) :]
        self._drop(start + 1, start)  # what the layer went on with by itself, and what was there before
        self._rows.append((start, hidden))
        if sum(len(rows) for _, rows in self._rows) > _WAITING:
            self._enter()
        if self._rows and self._rows[-1][0] >= start:  # the next pass writes there
            place, rows = self._rows[-1]
            self._rows[-1] = place, rows.clone()

    def read(self, text: Sequence[int]) -> None:
        """Nothing: what was heard is entered when the next token is asked for."""

    @torch.inference_mode()
    def next_logits(self, text: Sequence[int]) -> Tensor | None:
        """float32 (1, V) of what follows `text`; None if nobody has told what lies before its last token."""
        self.expect(text)
        self._enter()
        last = len(text) - 1
        if self._own is not None and self._entries[-1] == last - 1:
            self._run([last], self._own)
        if self._own is None or self._entries[-1] != last:
            return None
        return self._target.logits(self._own)

    def forget(self) -> None:
        """Start from nothing."""
        self._text, self._rows = [], []
        self._drop(0)

    def release(self) -> None:
        """Give the memory back."""
        self.forget()
        self._cache.release()
        self._layer.release()

    def _drop(self, token: int, row: int | None = None) -> None:
        """What was made of tokens from this place on, and rows from the place `row` (None: the same) on."""
        row = token if row is None else row
        kept = len(self._entries)
        while kept and self._entries[kept - 1] >= token:
            kept -= 1
        if kept < len(self._entries):
            self._own = None
            del self._entries[kept:]
            self._cache.truncate(kept)
        cut = [(place, rows[: max(0, row - place)]) for place, rows in self._rows]
        self._rows = [(place, rows) for place, rows in cut if len(rows)]

    def _enter(self) -> None:
        """Take in the rows whose next token is known."""
        end = len(self._text)
        waiting, self._rows = self._rows, []
        for place, rows in waiting:
            count = max(0, min(len(rows), end - 1 - place))
            for first in range(0, count, PREFILL_CHUNK):
                part = rows[first : min(count, first + PREFILL_CHUNK)]
                at = place + 1 + first
                self._run(range(at, at + len(part)), part)
            if count < len(rows):
                self._rows.append((place + count, rows[count:]))

    def _run(self, places: Sequence[int], hidden: Tensor) -> None:
        """Enter tokens, each with what lay before it. What an interrupted pass wrote is dropped."""
        start, target = len(self._entries), self._target
        try:
            tokens = torch.tensor([self._text[place] for place in places], device=hidden.device)
            at, embedded = torch.tensor(list(places), device=hidden.device), target.embed(tokens)
            made = self._layer.run(embedded, hidden.to(embedded.dtype), at, self._cache)
        except BaseException as error:
            self._cache.truncate(start)
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                raise UnsupportedModelError(
                    f"The MTP layer of {self.shape.name} cannot run: {sentence_of(error)}"
                ) from error
            raise
        self._own = made[-1:].clone()
        self._entries.extend(places)
