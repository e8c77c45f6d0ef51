"""Turn logits into a distribution or a token: repetition penalty, grammar, temperature, top-k, top-p, min-p,
in transformers' order. Used alike for draft and target. Accepts nothing.

A step asks for a distribution of every drafted token, and sorting a vocabulary of 150,000 takes the host as
long as a step takes the GPU; so what cannot survive the cuts is left out first (shortlist).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError
from localmoe.kernels.choices import check_chosen, likeliest
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.shortlist import SHORTLISTS, cut_shortlist

_APART = 64  # new tokens, from which on a text's tensor is made anew


def margin_of(scores: Tensor) -> float:
    """How far the largest of (V,) is ahead of the second: infinitely, where nothing else is possible."""
    first, *others = scores.topk(min(2, len(scores))).values.tolist()
    return first - others[0] if others else math.inf


class TokenSampler:
    """Applies one SamplingConfig with one random stream (on CPU, so that a seed means the same on every
    device)."""

    def __init__(self, config: SamplingConfig, grammar: Grammar | None = None) -> None:
        """grammar: what every token has to be allowed by, before anything else cuts."""
        self.config = config
        self.grammar = grammar
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        self.generator = torch.Generator().manual_seed(self.seed)
        self._penalty = (
            None
            if config.repetition_penalty == 1.0
            else RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty))
        )
        self._written = _Written()
        self._cuts_by_order = config.top_k > 0 or config.top_p < 1
        self._warpers = LogitsProcessorList()
        if not config.greedy:
            if config.temperature != 1.0:
                self._warpers.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k > 0:
                self._warpers.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(float(config.top_p)))
            if config.min_p > 0.0:
                self._warpers.append(MinPLogitsWarper(float(config.min_p)))

    def greedy_choices(self, logits: Tensor, history: Sequence[int], following: Sequence[int]) -> list[int]:
        """Argmax of each row, NO_CHOICE where that is no number. Row i comes after `history` and the first i
        tokens of `following`.

        Args:
            logits: (n, V) with n <= len(following) + 1.
        """
        if self._penalty is not None or self.grammar is not None:
            rows = [self._scored(row, [*history, *following[:i]]) for i, row in enumerate(logits)]
            logits = torch.stack(rows)
        choices: list[int] = likeliest(logits).tolist()
        return choices

    def first_choice(self, logits: Tensor, text: Sequence[int]) -> tuple[int, float]:
        """Argmax of the logits (V,) after `text`, and its margin."""
        scores = self._scored(logits, text)
        return int(scores.argmax()), margin_of(scores)

    def next_token(self, logits: Tensor, history: Sequence[int]) -> int:
        """The target's token after `history`, from logits (V,).

        Raises:
            CheckpointError: they are no numbers.
        """
        if self.config.greedy:
            choices = self.greedy_choices(logits[None], history, ())
            check_chosen(choices)
            return choices[0]
        return self.draw(self.distribution(logits, history))

    def distribution(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Probabilities (V,) in float32 on CPU of the next token after `history`, from logits (V,)."""
        scored = self._scored(logits, history)
        for length in SHORTLISTS:
            if self._cuts_by_order and length < len(scored):
                short = cut_shortlist(scored, length, self.config)
                if short is not None:
                    return short
        scores = scored[None].cpu()
        warped: Tensor = self._warpers(torch.empty(1, 0, dtype=torch.long), scores)
        return torch.softmax(warped[0], dim=-1)

    def draw(self, probabilities: Tensor) -> int:
        """One token from (V,) probabilities (need not be normalised).

        Raises:
            CheckpointError: they are none: not a number, or all zeros.
        """
        reached = probabilities.cumsum(0, dtype=torch.float64).numpy()
        total = float(reached[-1])
        if not 0 < total < math.inf:
            raise CheckpointError(
                f"The model's probabilities sum to {total:g}: its files may be damaged; get them anew."
            )
        mark = torch.rand((), dtype=torch.float64, generator=self.generator).item() * total
        mark = min(mark, math.nextafter(total, 0.0))  # it may round up to all
        return int(reached.searchsorted(mark, side="right"))  # the first that reaches beyond it

    def uniform(self) -> float:
        """One number in [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float32))

    def _scored(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Logits (V,) less the penalty; -inf for what the grammar forbids."""
        if self._penalty is not None:
            logits = self._penalty(self._written.ids(history, logits.device), logits[None])[0]
        allowed = None if self.grammar is None else self.grammar.allowed(history, len(logits))
        return logits if allowed is None else logits.masked_fill(~allowed.to(logits.device), -math.inf)


class _Written:
    """The tokens of a text that grows, as a tensor that is not made anew for each of them."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ids = torch.empty(1, 0, dtype=torch.long)

    def ids(self, history: Sequence[int], device: torch.device) -> Tensor:
        """(1, n) of all tokens of `history`."""
        count = len(self._tokens)
        if list(history[:count]) != self._tokens or len(history) > count + _APART:
            self._tokens, count = list(history), len(history)
            self._ids = torch.tensor([self._tokens], dtype=torch.long, device=device)
        new = torch.tensor([list(history[count:])], dtype=torch.long, device=device)
        return torch.cat([self._ids.to(device), new], dim=1)
