"""Quantises the experts of one MoE layer by GPTQ, from the tokens that its router sends them. Runs no model
and writes no file.

gate_up first, from the layer's own inputs; then down, from what the quantised gate_up makes of them, as the
draft will (sequential quantisation). Experts that few tokens chose are helped by a prior: for gate_up the
mean over all tokens, for down each expert's own answer to tokens drawn at random. The last tokens are held
out: they choose between GPTQ and rounding to nearest, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.core.errors import DraftError
from localmoe.core.units import format_bytes
from localmoe.kernels.codes import CodeMatrix, dequantize
from localmoe.quant.gptq import QuantizedExperts, gptq_quantize
from localmoe.quant.gptq_error import BetterOfTwo, keep_better
from localmoe.quant.gptq_memory import gptq_bytes
from localmoe.quant.hessian import HessianSums

HELD_OUT_PRIOR = 16.0  # tokens that all held-out tokens count for in one expert's error
PRIOR_TOKENS = 1024  # through every expert
_CPU_PIECE_FLOPS = 3e10  # of the columns' feedback at once: some tenths of a second
_ROWS = 2048  # tokens of one expert at a time


class LittleMemoryError(DraftError):
    """There is less memory than a build needs, which may be another time; its finished layers are fine."""


class LayerWeights(Protocol):
    """The experts of one layer, as a calibration needs them. I: intermediate size, H: hidden size."""

    @property
    def num_experts(self) -> int:
        """E."""

    def gate_up(self, expert: int) -> Tensor:
        """(2I, H), without a gate (I, H), in the stored dtype, rows in the order that `activate` wants."""

    def down(self, expert: int) -> Tensor:
        """(H, I)."""

    def activate(self, expert: int, product: Tensor) -> Tensor:
        """(n, 2I), without a gate (n, I) -> (n, I): bias, activation and gating."""

    def finish(self, expert: int, product: Tensor) -> Tensor:
        """(n, H) -> (n, H): the bias."""


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """Inputs of a layer's experts, on the device: hidden (T, H), index int64 (T, K), weights (T, K). The
    last `held_out` rows only judge."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    held_out: int

    @property
    def num_calibrating(self) -> int:
        """Rows that Hessians are made of."""
        return self.hidden.shape[0] - self.held_out


@dataclass(frozen=True, slots=True)
class QuantizedExpert:
    """One expert's codes, and the relative output errors on held-out tokens, of what was kept
    and of rounding to nearest, for gate_up and down."""

    gate_up: CodeMatrix
    down: CodeMatrix
    errors: tuple[float, float]
    nearest_errors: tuple[float, float]


class CalibratedLayer:
    """One layer's problem. Iterate over `experts()` once; then `outputs` (T, H) holds what the quantised
    experts answer, weighted and summed."""

    def __init__(
        self, tokens: LayerTokens, weights: LayerWeights, settings: GptqSettings, budget_bytes: int
    ) -> None:
        """budget_bytes: of device memory beside the tokens.

        Raises:
            LittleMemoryError: not even one expert fits into it.
        """
        self._tokens = tokens
        self._weights = weights
        self._settings = settings
        self._device = tokens.hidden.device
        self.outputs = torch.zeros(tokens.hidden.shape, dtype=torch.float32, device=self._device)
        self._chunk = self._experts_at_once(budget_bytes - self.outputs.nbytes)
        self._pairs = _pairs_by_expert(tokens.index, weights.num_experts)
        generator = torch.Generator().manual_seed(settings.seed)
        counts = (tokens.num_calibrating, tokens.held_out)
        drawn = [torch.randperm(count, generator=generator)[:PRIOR_TOKENS] for count in counts]
        self._random_tokens, self._judging_tokens = drawn[0], drawn[1] + tokens.num_calibrating

    def experts(self, tick: Callable[[], None]) -> Iterator[QuantizedExpert]:
        """All experts in order; `tick` is called between pieces of work and may raise."""
        hidden, calibrating = self._tokens.hidden, self._tokens.num_calibrating
        prior, judging_prior = self._mean(hidden[:calibrating]), self._mean(hidden[calibrating:])
        for first in range(0, self._weights.num_experts, self._chunk):
            chunk = range(first, min(first + self._chunk, self._weights.num_experts))
            tick()
            gate_up = self._gate_up(chunk, prior, judging_prior)
            tick()
            down = self._down(chunk, gate_up)
            for i, expert in enumerate(chunk):
                tick()
                self._answer(expert, gate_up.experts.matrix(i), down.experts.matrix(i))
                yield QuantizedExpert(
                    gate_up.experts.matrix(i),
                    down.experts.matrix(i),
                    (_kept_error(gate_up, i), _kept_error(down, i)),
                    (float(gate_up.nearest_errors[i]), float(down.nearest_errors[i])),
                )
            del gate_up, down

    def replay(self, experts: Iterable[tuple[CodeMatrix, CodeMatrix]], tick: Callable[[], None]) -> None:
        """Only fill `outputs`, from (gate_up, down) of each expert in order, quantised before."""
        for expert, (gate_up, down) in enumerate(experts):
            tick()
            self._answer(expert, gate_up.to(self._device), down.to(self._device))

    def _gate_up(self, chunk: range, prior: Tensor, judging_prior: Tensor) -> BetterOfTwo:
        weight = self._stacked(self._weights.gate_up, chunk)
        calibrating = slice(0, self._tokens.num_calibrating)
        held_out = slice(self._tokens.num_calibrating, None)
        found = self._quantize(weight, self._routed_sums(chunk, calibrating).take_means(prior))
        judges = self._routed_sums(chunk, held_out).take_means(judging_prior, HELD_OUT_PRIOR)
        return keep_better(weight, found, judges)

    def _down(self, chunk: range, gate_up: BetterOfTwo) -> BetterOfTwo:
        weight = self._stacked(self._weights.down, chunk)
        features = weight.shape[2]
        found = self._quantize(weight, self._inner_means(chunk, gate_up, features, calibrating=True))
        judges = self._inner_means(chunk, gate_up, features, calibrating=False)
        return keep_better(weight, found, judges)

    def _inner_means(self, chunk: range, gate_up: BetterOfTwo, features: int, *, calibrating: bool) -> Tensor:
        """(E, I, I) of what the quantised gate_up makes of the tokens of each expert, with a prior of its
        own."""
        sums, prior = (HessianSums.zeros(len(chunk), features, self._device) for _ in range(2))
        for i, expert in enumerate(chunk):
            matrix = dequantize(gate_up.experts.matrix(i), self._tokens.hidden.dtype)
            for token, k in self._parts(expert, calibrating=calibrating):
                sums.add(i, self._inner(expert, matrix, token), self._factors(token, k))
            random = self._random_tokens if calibrating else self._judging_tokens
            prior.add(i, self._inner(expert, matrix, random))
        return sums.take_means(prior.take_means(), None if calibrating else HELD_OUT_PRIOR)

    def _answer(self, expert: int, gate_up: CodeMatrix, down: CodeMatrix) -> None:
        """Add one expert's weighted answers to `outputs`; a token has each expert once, so the sum has one
        order."""
        dtype = self._tokens.hidden.dtype
        matrices = dequantize(gate_up, dtype), dequantize(down, dtype)
        for calibrating in (True, False):
            for token, k in self._parts(expert, calibrating=calibrating):
                product = F.linear(self._inner(expert, matrices[0], token), matrices[1])
                at = token.to(self._device)
                weight = self._tokens.weights[at, k.to(self._device)].float()
                answer = self._weights.finish(expert, product).float()
                self.outputs.index_add_(0, at, answer.mul_(weight[:, None]))

    def _inner(self, expert: int, gate_up: Tensor, token: Tensor) -> Tensor:
        """(n, I): what down is fed for these tokens."""
        rows = self._tokens.hidden[token.to(self._device)]
        return self._weights.activate(expert, F.linear(rows, gate_up))

    def _quantize(self, weight: Tensor, hessian: Tensor) -> QuantizedExperts:
        settings = self._settings
        return gptq_quantize(
            weight, hessian, settings.bits, settings.group_size, act_order=settings.act_order
        )

    def _routed_sums(self, chunk: range, rows: slice) -> HessianSums:
        hidden, tokens = self._tokens.hidden, self._tokens
        sums = HessianSums.zeros(len(chunk), hidden.shape[1], self._device, first_expert=chunk.start)
        weights = tokens.weights[rows] if self._settings.gate_weighted else None
        sums.add_routed(hidden[rows], tokens.index[rows], weights)
        return sums

    def _mean(self, rows: Tensor) -> Tensor:
        sums = HessianSums.zeros(1, rows.shape[1], self._device)
        sums.add(0, rows)
        return sums.pooled_mean()

    def _stacked(self, matrix: Callable[[int], Tensor], chunk: range) -> Tensor:
        return torch.stack([matrix(expert).to(self._device) for expert in chunk])

    def _factors(self, token: Tensor, k: Tensor) -> Tensor | None:
        """How much each pair counts in a Hessian; None: once."""
        if not self._settings.gate_weighted:
            return None
        return self._tokens.weights[token.to(self._device), k.to(self._device)].float().square()

    def _parts(self, expert: int, *, calibrating: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """(token, k) on the CPU of the pairs that chose an expert, some rows at a time."""
        token, k = self._pairs[expert]
        chosen = (token < self._tokens.num_calibrating) == calibrating
        yield from zip(token[chosen].split(_ROWS), k[chosen].split(_ROWS), strict=True)

    def _experts_at_once(self, budget_bytes: int) -> int:
        hidden, inner = self._weights.down(0).shape
        itemsize = self._weights.down(0).element_size()

        def needed(count: int) -> int:
            return chunk_bytes(count, hidden, inner, self._settings.group_size, itemsize)

        counts = range(1, self._weights.num_experts + 1)
        fitting = max((count for count in counts if needed(count) <= budget_bytes), default=0)
        if not fitting:
            wanted, allowed = needed(1) + self.outputs.nbytes, budget_bytes + self.outputs.nbytes
            raise LittleMemoryError(
                f"Building a GPTQ draft needs {format_bytes(wanted)} of device memory beside a layer's "
                f"tokens and shared weights, and the budget leaves {format_bytes(max(0, allowed))}: give a "
                "larger budget, or use --device cpu."
            )
        if self._device.type == "cpu":  # where a batch is no faster, and an answer may wait for the piece
            fitting = min(fitting, max(1, int(_CPU_PIECE_FLOPS // (2 * inner * hidden**2))))
        return fitting


def chunk_bytes(count: int, hidden: int, inner: int, group_size: int, itemsize: int) -> int:
    """Most bytes that quantising `count` experts of a layer at once holds beside tokens and outputs;
    itemsize: of a stored weight."""
    first = gptq_bytes(count, 2 * inner, hidden, group_size, weight_itemsize=itemsize)
    second = gptq_bytes(count, hidden, inner, group_size, weight_itemsize=itemsize)
    rows = 4 * _ROWS * (hidden + 4 * inner) + 4 * 3 * hidden * inner  # of one expert's products
    priors = 8 * hidden**2
    codes = 2 * count * 2 * hidden * inner  # of gate_up, chosen and not
    summing = 8 * count * inner**2  # Hessians and their priors
    return rows + priors + max(first, codes + max(second, summing))


def _pairs_by_expert(index: Tensor, num_experts: int) -> list[tuple[Tensor, Tensor]]:
    """(token, k) int64 on the CPU of the pairs that chose each expert, tokens ascending."""
    flat = index.flatten().cpu()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat.clamp(-1, num_experts) + 1, minlength=num_experts + 2)[1:-1]
    start = int((flat < 0).sum())
    found = []
    for count in counts.tolist():
        pairs = order[start : start + count]
        found.append((pairs // index.shape[1], pairs % index.shape[1]))
        start += count
    return found


def _kept_error(better: BetterOfTwo, i: int) -> float:
    errors = better.nearest_errors if i in better.experts.rounded else better.gptq_errors
    return float(errors[i])
