"""Chooses the token after each row of a pass, on the device: greedily, or as an answer's sampling settings
say. Keeps what of the text that takes; runs no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.kernels.choices import NEVER, SETTING_WORDS, ChoiceView, likeliest, write_settings
from localmoe.kernels.gpu.choices import choose_tokens
from localmoe.kernels.mirror import Mirror

ChoiceKind = Literal["argmax", "sampled", "penalised"]


class DeviceChoice:
    """How the answer at hand chooses.

    Attributes:
        kind: what a captured pass depends on; everything else it reads on the device. "argmax": of the logits
            as they are; "penalised": tokens of the text count less, greedily too. It stays as the last answer
            had it, so that the passes of the next one's prompt are captured already.
    """

    def __init__(self, device: torch.device) -> None:
        self.kind: ChoiceKind = "argmax"
        self._settings = Mirror(SETTING_WORDS, device)
        self._first: Mirror | None = None  # places of tokens, two a word; made once the vocabulary is known
        self._seen = torch.empty(0, dtype=torch.int32, device=device)

    def prepare(self, logits: Tensor) -> None:
        """Allocate for such logits, (R, V), and compile."""
        vocab = logits.shape[1]
        self._first = Mirror(-(-vocab // 2), logits.device)
        self._seen = self._first.words.view(torch.int32)[:vocab]
        positions = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self._upload(SamplingConfig(), 0)
        choose_tokens(logits, positions, self._view)

    def expect(self, config: SamplingConfig) -> None:
        """What comes next chooses so, or nobody reads what it chooses."""
        if config.repetition_penalty != 1.0:
            self.kind = "penalised"
        else:
            self.kind = "argmax" if config.greedy else "sampled"

    def begin(self, config: SamplingConfig, seed: int, text: Sequence[int]) -> None:
        """The answer at hand chooses so. text: all tokens up to now, the first at position 0."""
        self.expect(config)
        if self.kind == "penalised":
            assert self._first is not None, "prepare comes first"
            first = self._first.host.view(np.int32)
            first[:] = NEVER
            tokens, places = np.unique(np.asarray(text), return_index=True)
            first[tokens] = places
            self._first.upload()
        self._upload(config, seed)

    def note(self, start: Tensor, tokens: Tensor, live: Tensor | None = None) -> None:
        """The text goes on with the first `live` (1,) of tokens (R,), at positions from `start` (1,) on, and
        with nothing else."""
        if self.kind == "penalised":
            self._seen.masked_fill_(self._seen >= start, NEVER)
            rows = torch.arange(len(tokens), device=tokens.device)
            places = (start + rows).int()
            if live is not None:
                places.masked_fill_(rows >= live, NEVER)
            self._seen.scatter_reduce_(0, tokens, places, "amin")

    def readable(self, tokens: Tensor) -> Tensor:
        """Token 0 instead of NO_CHOICE: a pass behind one that could not choose has to read something."""
        return tokens.clamp(min=0)

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """int64 (R,): the token after each row of (R, V), which stands at `positions` (R,). NO_CHOICE where
        logits are no numbers."""
        if self.kind == "argmax":
            return likeliest(logits)
        return choose_tokens(logits, positions, self._view)[0]

    def choose_surely(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and how sure each choice is: float32 (R,), see speculative.margin_rates."""
        return choose_tokens(logits, positions, self._view)

    @property
    def _view(self) -> ChoiceView:
        return ChoiceView(self._settings.words, self._seen)

    def _upload(self, config: SamplingConfig, seed: int) -> None:
        write_settings(self._settings.host, config, seed)
        self._settings.upload()
