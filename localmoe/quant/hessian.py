"""Second moments of what each expert's matrix is fed: sums over routed tokens, and their mean with a prior.
Runs no model and does not decide which tokens are seen.

GPTQ's Hessian of a layer's squared error is H = 2 X^T X (Frantar et al. 2022, section 3); here it is the mean
of w x x^T over an expert's tokens, since GPTQ does not depend on a factor. With gate weighting w is the
square of the router's weight, which is how an expert's error counts in the layer's output (MoEQuant, Hu et
al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.quant.gptq_precision import exact_float32

PRIOR_STRENGTH = 1.0  # tokens that a prior counts for, in input features
_CHUNK_BYTES = 64 << 20  # of float32 rows at once


@dataclass(frozen=True, slots=True)
class HessianSums:
    """Sums for experts `first_expert` and the E - 1 after it. Its tensors change with every `add`.

    Attributes:
        sums: float32 (E, K, K), the sum of w x x^T.
        weights: float64 (E, 2), the sums of w and of w^2.
        first_expert: index of expert 0 of `sums` in the router's choice.
    """

    sums: Tensor
    weights: Tensor
    first_expert: int = 0

    @classmethod
    def zeros(
        cls, num_experts: int, in_features: int, device: torch.device | str, *, first_expert: int = 0
    ) -> HessianSums:
        """Nothing seen yet."""
        shape = num_experts, in_features, in_features
        # not PyTorch's default: transformers changes that for the whole process while it builds a model
        sums = torch.zeros(shape, dtype=torch.float32, device=device)
        weights = torch.zeros(num_experts, 2, dtype=torch.float64, device=device)
        return cls(sums, weights, first_expert)

    def add(self, expert: int, rows: Tensor, weights: Tensor | None = None) -> None:
        """Add the inputs (T, K), of any float dtype and any device, of the expert at position `expert`; their
        weights w (T,), None: 1."""
        device = self.sums.device
        step = max(1, _CHUNK_BYTES // (4 * rows.shape[1]))
        with exact_float32():
            for start in range(0, rows.shape[0], step):
                x = rows[start : start + step].to(device, torch.float32)
                if weights is None:
                    self.weights[expert] += x.shape[0]
                    self.sums[expert].addmm_(x.T, x)
                    continue
                w = weights[start : start + step].to(device, torch.float32)
                self.weights[expert] += torch.stack((w, w.square())).double().sum(1)
                self.sums[expert].addmm_((x * w[:, None]).T, x)

    def add_routed(self, x: Tensor, index: Tensor, router_weights: Tensor | None = None) -> None:
        """Add each token of x (T, K) to the experts that the router chose for it.

        Args:
            index: int64 (T, k) experts; those that are not summed here are passed over.
            router_weights: (T, k); with them a token counts by its weight's square, else by 1.
        """
        pairs = index.flatten() - self.first_expert
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs.clamp(-1, self.sums.shape[0]) + 1, minlength=self.sums.shape[0] + 2)
        ends = counts.cumsum(0).tolist()  # of each expert's run in `order`
        squares = None if router_weights is None else router_weights.flatten().float().square()
        step = max(1, _CHUNK_BYTES // (4 * x.shape[1]))
        for expert in range(self.sums.shape[0]):
            for part in order[ends[expert] : ends[expert + 1]].split(step):
                self.add(expert, x[part // index.shape[1]], None if squares is None else squares[part])

    def token_counts(self) -> Tensor:
        """float64 (E,): tokens seen; weighted ones count as their effective number, (sum w)^2 / sum w^2 (Kish
        1965)."""
        total, squares = self.weights.unbind(1)
        return total.square() * _inverse(squares)

    def take_means(self, prior: Tensor | None = None, prior_tokens: float | None = None) -> Tensor:
        """float32 (E, K, K): (n H_e + n0 H_prior) / (n + n0) of means H; it takes the memory of the sums, and
        this object holds no sums any more.

        A Hessian of few tokens fits those and no others, so that GPTQ with it is worse than rounding to
        nearest on the next tokens; a prior of many tokens mends that. Without a prior it is the mean, zeros
        for an expert that saw no token.

        Args:
            prior: (K, K), a mean over tokens that stand for all, as `pooled_mean` gives; or (E, K, K), where
                each expert's inputs have a space of their own (those of its down projection).
            prior_tokens: n0; None: PRIOR_STRENGTH tokens an input feature.
        """
        features = self.sums.shape[1]
        counts = self.token_counts()
        strength = PRIOR_STRENGTH * features if prior_tokens is None else prior_tokens
        assert strength >= 0
        mean = _inverse(self.weights[:, 0])
        if prior is None:
            self.sums.mul_(mean.float()[:, None, None])
        else:
            share = counts * _inverse(counts + strength)
            self.sums.mul_((share * mean).float()[:, None, None])
            for expert, rest in enumerate((1 - share).float()):
                part = prior if prior.dim() == 2 else prior[expert]
                self.sums[expert].addcmul_(part.to(self.sums.device, torch.float32), rest)
        self.weights.zero_()
        return self.sums

    def pooled_mean(self) -> Tensor:
        """float32 (K, K): the mean over the tokens of all experts, a token as often as it was added; a prior
        for matrices that share their inputs' space."""
        return self.sums.sum(0).mul_(_inverse(self.weights[:, 0].sum()).float())


def _inverse(numbers: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0."""
    return torch.where(numbers > 0, 1 / numbers, 0)
