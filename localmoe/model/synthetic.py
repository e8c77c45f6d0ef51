"""Simulated routing, acceptance and margins for models with random weights. Decides no router weights and
no tokens.

All draws are functions of (seed, answer, absolute position), so a token that is drafted, rejected and drafted
again is routed alike, and settings that are compared see the same routing. Routing is made in blocks of
positions ahead of use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.errors import ConfigError
from localmoe.core.gates import Gate
from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Phase

BLOCK = 256  # positions drawn at once
_TARGET, _DRAFT, _ACCEPTANCE, _MARGIN = range(4)  # streams of random numbers
# margins (speculative.margin_rates) that the embedded model's INT4 draft has where its tokens are accepted,
# and where they are rejected: counts of 3,397 tokens (benchmarks/draft_margins.py)
_MARGINS = np.array([0.05, 0.15, 0.27, 0.42, 0.62, 0.87, 1.25, 1.75, 2.5, 3.5, 5.0, 8.0])
_ACCEPTED = np.array([48, 47, 77, 89, 171, 168, 232, 234, 449, 435, 699, 640]) / 3289
_REJECTED = np.array([44, 17, 28, 11, 4, 2, 2, 0, 0, 0, 0, 0]) / 108
Experts = NDArray[np.int64]


class SyntheticModel:
    """Routing of L MoE layers with E experts, K a token.

    "uniform": K distinct experts for each (position, layer), every choice alike likely. "sticky:P": at an
    answer's first position the same; then each of the K experts of the position before stays with
    probability P, independently, and one that does not is replaced by one drawn uniformly from those that
    the position before did not use (without replacement; where they run out, which takes E < 2 K, it
    stays). So the expected repeat share of neighbouring positions is P. "trace": row p of answer a is row p
    after the start of the trace's prompt a, around the end to the beginning.
    """

    def __init__(
        self, settings: SyntheticSettings, num_layers: int, num_experts: int, experts_per_token: int
    ) -> None:
        """
        Raises:
            ConfigError: the trace cannot be read or is of a model of another shape, or there are no other
                experts for a draft that does not match.
        """
        self.settings = settings
        self._shape = num_layers, num_experts, experts_per_token
        self._trace: RoutingTrace | None = None
        if settings.routing is not None and settings.routing.path is not None:
            self._trace = RoutingTrace.read(settings.routing.path)
            self._trace.check_fits(num_layers, num_experts, experts_per_token)
        if settings.match is not None and settings.match < 1 and num_experts <= experts_per_token:
            raise ConfigError(
                f"All {num_experts} experts are used for every token, so a draft matches always: use a "
                "synthetic match of 1."
            )
        self._answer = 0
        self._targets: list[Experts] = []
        self._drafts: list[Experts] = []
        self._accepted: list[NDArray[np.bool_]] = []
        self._margins: list[NDArray[np.float64]] = []
        self._order: Experts | None = None  # (L, E) of "sticky": a layer's experts, those in use first

    def begin(self, answer: int) -> None:
        """Answer number `answer` starts (0 is the first)."""
        if answer != self._answer:
            self._answer, self._order = answer, None
            for blocks in (self._targets, self._drafts, self._accepted, self._margins):
                blocks.clear()

    def forced(self, phase: Phase, start: int, count: int) -> Experts | None:
        """(count, L, K) int64 experts of positions from `start` on, or None where the router decides."""
        if self.settings.routing is None or (phase == "draft" and self.settings.match is None):
            return None
        return self.draft_window(start, count) if phase == "draft" else self.target_window(start, count)

    def target_routing(self, position: int) -> Experts:
        """(L, K) experts of one position in the target."""
        routing: Experts = self.target_window(position, 1)[0]
        return routing

    def draft_routing(self, position: int) -> Experts:
        """(L, K) experts of one position in the draft: at each layer the target's with probability
        `match`, else with one of them, drawn uniformly, replaced by another expert, drawn uniformly."""
        routing: Experts = self.draft_window(position, 1)[0]
        return routing

    @property
    def simulates_acceptance(self) -> bool:
        """Else the target has its say."""
        return self.settings.acceptance is not None

    def accepts(self, position: int) -> bool:
        """Whether a drafted token at this position is accepted."""
        block, row = divmod(position, BLOCK)
        while len(self._accepted) <= block:
            drawn = self._generator(_ACCEPTANCE, len(self._accepted)).random(BLOCK)
            self._accepted.append(drawn < (self.settings.acceptance or 0.0))
        return bool(self._accepted[block][row])

    def accepted(self, start: int, count: int) -> int:
        """How many of `count` tokens drafted at positions from `start` on are accepted."""
        return next((i for i in range(count) if not self.accepts(start + i)), count)

    def margins(self, start: int, count: int) -> list[float]:
        """How sure the draft is of what it drafts at `count` positions from `start` on: as the embedded
        model's is of tokens that are accepted, or rejected."""
        while len(self._margins) * BLOCK < start + count:
            block = len(self._margins)
            drawn = self._generator(_MARGIN, block).random(BLOCK)
            accepted = [self.accepts(block * BLOCK + i) for i in range(BLOCK)]
            kinds = np.where(accepted, *(np.searchsorted(s.cumsum(), drawn) for s in (_ACCEPTED, _REJECTED)))
            self._margins.append(_MARGINS[np.minimum(kinds, len(_MARGINS) - 1)])
        return [float(self._margins[at // BLOCK][at % BLOCK]) for at in range(start, start + count)]

    def target_window(self, start: int, count: int) -> Experts:
        """(count, L, K): `target_routing` of positions from `start` on."""
        last = (start + count - 1) // BLOCK
        while len(self._targets) <= last:
            self._targets.append(self._target_block(len(self._targets)))
        return _slice(self._targets, start, count)

    def draft_window(self, start: int, count: int) -> Experts:
        """(count, L, K): `draft_routing` of positions from `start` on."""
        last = (start + count - 1) // BLOCK
        while len(self._drafts) <= last:
            block = len(self._drafts)
            self._drafts.append(self._draft_block(block, self.target_window(block * BLOCK, BLOCK)))
        return _slice(self._drafts, start, count)

    def _generator(self, stream: int, block: int) -> np.random.Generator:
        return np.random.default_rng((self.settings.seed, self._answer, stream, block))

    def _target_block(self, block: int) -> Experts:
        routing = self.settings.routing
        assert routing is not None, "the router decides"
        layers, experts, top_k = self._shape
        if self._trace is not None:
            return self._trace.rows(self._answer, block * BLOCK, BLOCK)
        generator = self._generator(_TARGET, block)
        if routing.kind == "uniform":
            return _distinct(generator, BLOCK * layers, top_k, experts).reshape(BLOCK, layers, top_k)
        return self._sticky_block(generator, routing.repeat)

    def _sticky_block(self, generator: np.random.Generator, repeat: float) -> Experts:
        """An expert that does not stay changes places with one of those not in use, layer by layer."""
        layers, experts, top_k = self._shape
        if self._order is None:
            self._order = generator.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
        order = self._order.reshape(-1)  # a view
        leaves = generator.random((BLOCK, layers, top_k)) >= repeat
        # ranks of experts that are not in use, different for each of the K; past them there is none
        ranks = _distinct(generator, BLOCK * layers, top_k, max(experts - top_k, top_k)).reshape(leaves.shape)
        leaves &= ranks < experts - top_k
        position, layer, place = leaves.nonzero()
        old, new = layer * experts + place, layer * experts + top_k + ranks[leaves]
        ends = np.searchsorted(position, np.arange(BLOCK), side="right").tolist()
        out, begin = np.empty((BLOCK, layers, top_k), np.int64), 0
        for i, end in enumerate(ends):
            here, there = old[begin:end], new[begin:end]
            order[here], order[there] = order[there], order[here]
            out[i], begin = self._order[:, :top_k], end
        return out

    def _draft_block(self, block: int, target: Experts) -> Experts:
        layers, experts, top_k = self._shape
        match = self.settings.match
        assert match is not None, "the draft's router decides"
        if match == 1.0:
            return target
        generator = self._generator(_DRAFT, block)
        differs = generator.random((BLOCK, layers)) >= match
        place = generator.integers(0, top_k, differs.shape)
        other = _step_over(generator.integers(0, experts - top_k, differs.shape), target)
        replaced = differs[..., None] & (np.arange(top_k) == place[..., None])
        return np.where(replaced, other[..., None], target)


class SyntheticGate:
    """A gate for drafts whose acceptance is simulated: it hears the margins that are simulated with it."""

    def __init__(self, gate: Gate, synthetic: SyntheticModel, start: int) -> None:
        """start: position of the first drafted token."""
        self._gate, self._synthetic, self._start = gate, synthetic, start

    def goes_on(self, margins: Sequence[float], unheard: int = 0) -> bool:
        """As the gate says of simulated margins."""
        return self._gate.goes_on(self._synthetic.margins(self._start, len(margins)), unheard)

    def worth_verifying(self, margins: Sequence[float]) -> int:
        """Likewise."""
        return self._gate.worth_verifying(self._synthetic.margins(self._start, len(margins)))


def _distinct(generator: np.random.Generator, rows: int, count: int, bound: int) -> Experts:
    """(rows, count): in each row `count` different numbers below `bound`, every ordered choice alike
    likely."""
    drawn = np.empty((rows, count), np.int64)
    for i in range(count):
        drawn[:, i] = _step_over(generator.integers(0, bound - i, rows), drawn[:, :i])
    return drawn


def _step_over(ranks: Experts, taken: Experts) -> Experts:
    """The rank-th smallest number that is not among `taken`; ranks (...), taken (..., n) all different."""
    values = ranks
    for smaller in np.moveaxis(np.sort(taken, axis=-1), -1, 0):
        values = values + (values >= smaller)
    return values


def _slice(blocks: list[Experts], start: int, count: int) -> Experts:
    first, last = start // BLOCK, (start + count - 1) // BLOCK
    parts = blocks[first : last + 1]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return rows[start - first * BLOCK : start - first * BLOCK + count]
