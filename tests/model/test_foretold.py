"""Two ways of telling a draft's routing: they note the same, and tell policies the same in their own kinds of
event."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from localmoe.core.events import DraftRouted, Event, TokenRouted
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.model.foretold import LayerwiseForetold, TokenwiseForetold

LAYERS, EXPERTS, TOP_K = 3, 8, 2


@dataclass
class Passes:
    """A scheduler that remembers, and counts what is issued."""

    lookahead: LookaheadBuffer = field(default_factory=lambda: LookaheadBuffer(LAYERS))
    events: list[Event] = field(default_factory=list)
    pumped_after: list[int] = field(default_factory=list)

    @property
    def scheduler(self) -> Passes:
        return self

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def pump(self) -> None:
        self.pumped_after.append(len(self.events))


def test_layers_and_whole_tokens_say_the_same() -> None:
    chance = np.random.default_rng(5)
    by_layer, by_token = Passes(), Passes()
    layerwise = LayerwiseForetold(by_layer)  # type: ignore[arg-type]
    tokenwise = TokenwiseForetold(by_token, by_token, TOP_K, EXPERTS)  # type: ignore[arg-type]
    for token in range(4):
        for layer in range(LAYERS):
            experts = chance.permutation(EXPERTS)[:TOP_K].tolist()
            weights = np.float32(chance.random(TOP_K)).tolist()
            layerwise.foretell(token, layer, experts, weights)
            tokenwise.foretell(token, layer, experts, weights)
        layerwise.end_token()
        tokenwise.end_token()
    assert by_token.pumped_after == [1, 2, 3, 4] and by_layer.pumped_after == []
    for token in range(4):
        told = by_token.events[token]
        assert isinstance(told, TokenRouted) and told.token == token
        for layer in range(LAYERS):
            entry = by_layer.lookahead.get(token, layer)
            assert entry is not None and by_token.lookahead.get(token, layer) == entry
            assert by_layer.events[token * LAYERS + layer] == DraftRouted(
                token, layer, entry.experts, entry.confidences
            )
            assert tuple(told.experts[layer]) == entry.experts


def test_a_layer_of_which_nothing_is_told_asks_for_nothing() -> None:
    passes = Passes()
    foretold = TokenwiseForetold(passes, passes, TOP_K, EXPERTS)  # type: ignore[arg-type]
    for token, layers in enumerate([(0, 1, 2), (1,)]):
        for layer in layers:
            foretold.foretell(token, layer, [3, 1], [0.75, 0.25])
        foretold.end_token()
    told = passes.events[1]
    assert isinstance(told, TokenRouted)
    assert told.experts.tolist() == [[EXPERTS] * TOP_K, [3, 1], [EXPERTS] * TOP_K]
    assert told.confidences[1].tolist() == pytest.approx([0.75, 0.25])
