"""How a token is chosen from its logits where nobody waits for the host: repetition penalty, temperature,
top-k, top-p and min-p as transformers has them, then the Gumbel-max trick (Gumbel 1954; Maddison et al.
2014): the largest of score + noise, where noise is a function of seed, position and token. So draft and
target, with the same noise, choose the same token as often as their distributions are alike, and what the
target chooses does not depend on what was drafted (Daliri, Musco and Suresh 2024, "Coupling without
communication and drafter-invariant speculative decoding").

Words in which a device finds the settings, and the torch reference. Decides nothing about kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.errors import CheckpointError

NEVER = 2**31 - 1  # position of a token that the text does not have
NO_CHOICE = -1  # of logits that are no numbers
SETTING_WORDS = 6
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class ChoiceView:
    """What a kernel reads.

    Attributes:
        words: int64 (SETTING_WORDS,): the seed and top_k; beside them, as float64, temperature (0: greedy),
            top_p, min_p and penalty. See `write_settings`.
        seen: int32 (V,), position at which each token first stands in the text, or NEVER.
    """

    words: Tensor
    seen: Tensor


def check_chosen(tokens: Sequence[int]) -> None:
    """Tokens that were chosen.

    Raises:
        CheckpointError: one could not be, as logits were no numbers.
    """
    if NO_CHOICE in tokens:
        raise CheckpointError(
            "The model's probabilities are no numbers: its files may be damaged; get them anew."
        )


def likeliest(logits: Tensor) -> Tensor:
    """int64 (R,): the first of the largest in each row of (R, V); NO_CHOICE where that is no number."""
    largest, tokens = logits.max(-1)  # which is NaN where one of the row is
    return torch.where(largest < math.inf, tokens, NO_CHOICE)


def write_settings(host: NDArray[np.int64], config: SamplingConfig, seed: int) -> None:
    """Fill SETTING_WORDS words that a ChoiceView shows."""
    host[:2] = seed, config.top_k
    numbers = host.view(np.float64)
    numbers[2:6] = config.temperature, config.top_p, config.min_p, config.repetition_penalty


def reference_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """float32 (V,) of standard Gumbel noise for the token after `position`, by Philox 4x32-10 (Salmon et al.
    2011) of the token's id and the position, keyed by the seed."""
    zeros = np.zeros(vocab_size, dtype=np.uint64)
    words = [np.arange(vocab_size, dtype=np.uint64), zeros + np.uint64(position), zeros, zeros]
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        left, right = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            right >> np.uint64(32) ^ words[1] ^ np.uint64(low), right & _LOW,
            left >> np.uint64(32) ^ words[3] ^ np.uint64(high), left & _LOW,
        ]  # fmt: skip
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    # 23 bits and a half, so that it is neither 0 nor 1 in float32
    uniform = ((words[0] >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -torch.log(-torch.log(torch.from_numpy(uniform)))


def reference_scores(logits: Tensor, seen: Tensor, position: int, config: SamplingConfig) -> Tensor:
    """float32 (V,), penalised and divided by the temperature; -inf where a cut leaves a token out.

    Args:
        logits: (V,).
        seen: see ChoiceView; tokens up to `position` are penalised.
    """
    scores, penalty = logits.float(), config.repetition_penalty
    if penalty != 1.0:
        changed = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen <= position, changed, scores)
    if config.greedy:
        return scores
    scores = scores / config.temperature
    if 0 < config.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(config.top_k).values[-1], -torch.inf)
    p = scores.double().softmax(0)
    if config.top_p < 1:
        best, order = p.sort(descending=True)
        better = best.cumsum(0) - best
        better = better[torch.searchsorted(-best, -best)]  # equals have the same better ones
        scores = scores.index_fill(0, order[(better >= config.top_p) & (better > 0)], -torch.inf)
    if config.min_p > 0:
        scores = scores.masked_fill(p < config.min_p * p.max(), -torch.inf)
    return scores


def reference_choices(
    logits: Tensor, seen: Tensor, positions: Tensor, config: SamplingConfig, seed: int
) -> Tensor:
    """int64 (R,): the token after each row of logits (R, V), which stands at `positions` (R,). NO_CHOICE
    where logits are no numbers."""
    chosen = []
    for row, position in zip(logits, positions.tolist(), strict=True):
        scores = reference_scores(row, seen, position, config)
        if not torch.isfinite(scores.max()):
            chosen.append(NO_CHOICE)
            continue
        noise = 0.0 if config.greedy else reference_noise(seed, position, len(row))
        chosen.append(int((scores + noise).argmax()))
    return torch.tensor(chosen)
