"""Top-k, top-p and min-p on the likeliest tokens alone, where no other one survives them. Draws nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from localmoe.core.config import SamplingConfig

SHORTLISTS = (512, 8192)  # tokens; tried in this order, then the whole vocabulary


def cut_shortlist(logits: Tensor, length: int, config: SamplingConfig) -> Tensor | None:
    """What transformers' warpers leave of logits, if that lies within the `length` best.

    Args:
        logits: (V,), on any device.

    Returns:
        Probabilities (V,) in float32 on CPU; None where tokens beyond the shortlist may survive.
    """
    scores = logits.float() / config.temperature
    best, tokens = scores.topk(length)  # from the best on
    whole = scores.logsumexp(0)
    best, tokens, whole = best.cpu().double(), tokens.cpu(), whole.cpu().double()
    alive = best > -torch.inf  # what a grammar forbids never is
    if 0 < config.top_k < len(logits):
        if config.top_k >= length:
            return None
        alive &= best >= best[config.top_k - 1]  # its equals stay too
        if alive[-1]:  # of which more may lie beyond: what top-p leaves depends on how many
            return None
        whole = best[alive].logsumexp(0)
    p = (best - whole).exp()
    if config.top_p < 1:
        alive &= p.cumsum(0) - p < config.top_p  # the sum of those that are better
        alive[0] = True
    if config.min_p > 0:
        alive &= p >= config.min_p * p[0]
    if alive[-1]:
        return None
    probabilities = torch.zeros(len(logits), dtype=torch.float32)
    probabilities[tokens[alive]] = best[alive].softmax(0).float()
    return probabilities
