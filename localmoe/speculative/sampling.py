"""Turn logits into a distribution or a token: repetition penalty, temperature, top-k, top-p, min-p, in
transformers' order. Used alike for draft and target. Accepts nothing.
"""

from __future__ import annotations

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


class TokenSampler:
    """Applies one SamplingConfig with one random stream (on CPU, so that a seed means the same on every
    device)."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.seed = secrets.randbits(63) if config.seed is None else config.seed
        self.generator = torch.Generator().manual_seed(self.seed)
        self._penalty = (
            None
            if config.repetition_penalty == 1.0
            else RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty))
        )
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

    @property
    def plainly_greedy(self) -> bool:
        """Whether every token is the argmax of the logits as they are."""
        return self.config.greedy and self._penalty is None

    def greedy_choices(self, logits: Tensor, history: Sequence[int], following: Sequence[int]) -> list[int]:
        """Argmax of each row. Row i comes after `history` and the first i tokens of `following`.

        Args:
            logits: (n, V) with n <= len(following) + 1.
        """
        if self._penalty is None:
            choices: list[int] = logits.argmax(-1).tolist()
            return choices
        rows = [self._penalised(row, [*history, *following[:i]]) for i, row in enumerate(logits)]
        return [int(row.argmax()) for row in rows]

    def next_token(self, logits: Tensor, history: Sequence[int]) -> int:
        """The target's token after `history`, from logits (V,)."""
        if self.config.greedy:
            return self.greedy_choices(logits[None], history, ())[0]
        return self.draw(self.distribution(logits, history))

    def distribution(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Probabilities (V,) in float32 on CPU of the next token after `history`, from logits (V,)."""
        scores = self._penalised(logits, history)[None].cpu()
        warped: Tensor = self._warpers(torch.empty(1, 0, dtype=torch.long), scores)
        return torch.softmax(warped[0], dim=-1)

    def draw(self, probabilities: Tensor) -> int:
        """One token from (V,) probabilities (need not be normalised)."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def uniform(self) -> float:
        """One number in [0, 1)."""
        return float(torch.rand((), generator=self.generator))

    def _penalised(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        if self._penalty is None:
            return logits
        ids = torch.tensor([list(history)], dtype=torch.long, device=logits.device)
        penalised: Tensor = self._penalty(ids, logits[None].clone())[0]
        return penalised
