"""Drafting by another model: proposes its tokens, and tells what the target's gates make of its hidden
states, where they can read them. Does not decide how many tokens are proposed, nor which are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from localmoe.core.gates import Gate
from localmoe.core.timeline import Timeline
from localmoe.model.cross_gates import CrossGates
from localmoe.model.foretold import Foretold
from localmoe.speculative.drafters import Proposal, Soundness
from localmoe.speculative.sampling import TokenSampler


class DraftingText(Protocol):
    """What is known of a model that drafts."""

    @property
    def vocab_size(self) -> int:
        """Of its logits."""

    @property
    def max_context(self) -> int:
        """Most tokens of a text."""


class DraftingModel(Protocol):
    """Another model, or a layer of the target's own."""

    @property
    def shape(self) -> DraftingText:
        """What is known of it."""

    def read(self, text: Sequence[int]) -> None:
        """Read `text` but for its last token."""

    def next_logits(self, text: Sequence[int]) -> Tensor | None:
        """float32 (1, V) of what follows `text`; None: it cannot say."""


class ModelDrafter:
    """Proposals of a draft model that shares the target's tokenizer."""

    tells_margins = True

    def __init__(
        self,
        model: DraftingModel,
        gates: CrossGates | None,
        foretold: Foretold,
        vocab_size: int,
        end_tokens: frozenset[int],
        timeline: Callable[[], Timeline | None] = lambda: None,
    ) -> None:
        """vocab_size: of the target's logits, which may be padded otherwise. timeline: who wants to know when
        tokens were drafted, if anybody does."""
        self._model = model
        self._gates = gates
        self._foretold = foretold
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._timeline = timeline
        self._sound = Soundness()

    def propose(
        self,
        history: Sequence[int],
        count: int,
        sampler: TokenSampler,
        stop: threading.Event | None,
        gate: Gate | None = None,
    ) -> Proposal:
        """Draft until `count` tokens, an end token, the gate, `stop`, or the longest text that the model
        takes."""
        proposal = Proposal([], [])
        text, shape = list(history), self._model.shape
        if self._sound.lost:
            return proposal
        if shape.vocab_size < self._vocab_size and max(text) >= shape.vocab_size:
            return proposal  # a token that only pads the target's vocabulary
        for position in range(min(count, shape.max_context - len(text))):
            if stop is not None and stop.is_set():
                break
            started, timeline = time.perf_counter(), self._timeline()
            logits = self._next_logits(text, position)
            if logits is None:
                break
            if timeline is not None:
                timeline.add("draft", f"token {position + 1}", started)
            token = proposal.add(logits, text, sampler)
            if token is None:
                self._sound.lose()
                break
            text.append(token)
            if text[-1] in self._end_tokens or (gate is not None and not gate.goes_on(proposal.margins)):
                break
        return proposal

    def _next_logits(self, text: list[int], position: int) -> Tensor | None:
        self._model.read(text)  # whose routing nobody asks for
        if self._gates is None:
            logits = self._model.next_logits(text)
        else:
            self._gates.listener = partial(self._foretold.foretell, position)
            try:
                logits = self._model.next_logits(text)
            finally:
                self._gates.listener = None
            self._foretold.end_token()
        return None if logits is None else self._fitted(logits)

    def _fitted(self, logits: Tensor) -> Tensor:
        """(1, V) of the target: rows that only pad a vocabulary differ between models."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return torch.cat([logits, logits.new_full((1, missing), -torch.inf)], dim=1)
