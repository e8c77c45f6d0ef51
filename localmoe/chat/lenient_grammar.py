"""A grammar that nobody asked for, and that gives up where it cannot go on: the answer is the model's own
from there. Chooses no tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from localmoe.core.errors import ConfigError
from localmoe.speculative.grammar import Grammar

_LOG = logging.getLogger(__name__)
_Said = TypeVar("_Said")


class LenientGrammar:
    """Around one of one answer, see speculative.grammar.Grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar: Grammar | None = grammar

    def allowed(self, text: Sequence[int], count: int) -> Tensor | None:
        """As the protocol says."""
        every: Tensor | None = torch.ones(count, dtype=torch.bool)
        return self._ask(lambda one: one.allowed(text, count), every)

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """As the protocol says."""
        return self._ask(lambda one: one.valid(text, tokens), len(tokens))

    def free(self, text: Sequence[int]) -> bool:
        """As the protocol says."""
        return self._ask(lambda one: one.free(text), True)

    def forced(self, text: Sequence[int]) -> list[int]:
        """As the protocol says."""
        return self._ask(lambda one: one.forced(text), [])

    def _ask(self, question: Callable[[Grammar], _Said], otherwise: _Said) -> _Said:
        if self._grammar is None:
            return otherwise
        try:
            return question(self._grammar)
        except ConfigError as reason:  # it takes more than it may
            _LOG.info("calls of tools are not held to their schemas any more: %s", reason)
            self._grammar = None
            return otherwise
