"""How a draft's routing reaches the lookahead buffer and the policy: layer by layer, or a token at a time
where whole passes run on a GPU. Predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from localmoe.core.events import DraftRouted, TokenRouted
from localmoe.core.lookahead import LookaheadBuffer, LookaheadEntry
from localmoe.prefetch.scheduler import Scheduler


class Foretold(Protocol):
    """Whoever wants to know which experts the target will use. Tokens come in order."""

    def foretell(self, token: int, layer: int, experts: Sequence[int], weights: Sequence[float]) -> None:
        """Window token `token` will probably use `experts` at MoE layer `layer`."""

    def end_token(self) -> None:
        """Nothing more is told of that token."""


class PassesTold(Protocol):
    """What passes share."""

    @property
    def scheduler(self) -> Scheduler:
        """Whom events are told to."""

    @property
    def lookahead(self) -> LookaheadBuffer:
        """Where they are kept."""


class LayerwiseForetold:
    """At once: copies begin while the draft is at the next layer."""

    def __init__(self, passes: PassesTold) -> None:
        self._passes = passes

    def foretell(self, token: int, layer: int, experts: Sequence[int], weights: Sequence[float]) -> None:
        """Note it and tell the policy."""
        entry = LookaheadEntry(tuple(experts), tuple(weights))
        self._passes.lookahead.record(token, layer, entry)
        self._passes.scheduler.notify(DraftRouted(token, layer, entry.experts, entry.confidences))

    def end_token(self) -> None:
        """All is told."""


class DeviceMemoryTold(Protocol):
    """The slots' part in it."""

    def pump(self) -> None:
        """Issue the copies that the policy wants by now."""


class TokenwiseForetold:
    """When the token's draft pass is over, since the host issues copies between passes."""

    def __init__(self, passes: PassesTold, memory: DeviceMemoryTold, top_k: int, num_experts: int) -> None:
        self._passes = passes
        self._memory = memory
        shape = (passes.lookahead.num_layers, top_k)
        self._experts = np.full(shape, num_experts, dtype=np.int32)  # past the experts: none
        self._weights = np.zeros(shape, dtype=np.float32)
        self._nothing = num_experts
        self._token = 0

    def foretell(self, token: int, layer: int, experts: Sequence[int], weights: Sequence[float]) -> None:
        """Keep it for the token's end."""
        self._token = token
        self._experts[layer], self._weights[layer] = experts, weights

    def end_token(self) -> None:
        """Note the token as a whole, tell the policy, and issue copies."""
        experts, weights = self._experts.copy(), self._weights.copy()
        self._experts.fill(self._nothing)
        self._weights.fill(0.0)
        self._passes.lookahead.record_token(experts, weights)
        self._passes.scheduler.notify(TokenRouted(self._token, experts, weights))
        self._memory.pump()
