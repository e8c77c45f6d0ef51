"""moe-infinity: MoE-Infinity (Xue et al. 2024): sequences are remembered by how often they activated each
expert; the one most like the sequence at hand says what it will use.

EAM: the (L, E) counts of a sequence's activations, prompt included. Those of earlier sequences are
collected; when there is no more room, the one that was matched least often goes. At layer l, rows up to l
of all of them are masked, rows are normalised, and the collected EAM with the highest mean cosine is the
match, EAM*. It predicts p[l', e] = (EAM*[l', e] + 1e-8) (1 - (l' - l) / (L + 1)) for l' > l (here for what
EAM* knows at all), and experts are copied in the order of p. Evicted is the least product of frequency over
all sequences, share in this sequence's EAM, and nearness of the layer. Predictions need the events of
single layers; where whole passes run, the cache alone is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    Event,
    LayerDemanded,
    PassRouted,
    PrefetchRequest,
    PrefillStarted,
    RoomWanted,
    StepStarted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase

CAPACITY = 32  # sequences that are remembered
_LITTLE = 1e-8
_AT_ONCE = 4  # times a token's experts: so many are asked for at a layer, before the next one asks again


class MoeInfinityPolicy(PolicyBase):
    """Counts of this sequence, of all, and of those remembered."""

    name = "moe-infinity"
    needs_layers = True

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        cells = (shape.num_layers, shape.num_experts)
        self._eam = np.zeros(cells)
        self._frequency = np.zeros(cells)
        self._collection = np.zeros((0, *cells))
        self._matched: list[int] = []  # how often each was the match
        self._match_of: NDArray[np.intp] | None = None  # (L,): the match at each layer of this step
        self._layer = -1  # that computes now
        self._decoding = False
        self._rows: list[list[float]] | None = None

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Count, match, predict."""
        self._rows = None
        match event:
            case PrefillStarted():
                if self._decoding:
                    self._remember()
                self._decoding = False
            case StepStarted():
                self._decoding, self._layer = True, -1
                self._match_of = self._find_matches()
            case LayerDemanded():
                counts = event.counts or (1,) * len(event.experts)
                self._eam[event.layer, list(event.experts)] += counts
                self._frequency[event.layer, list(event.experts)] += counts
                self._layer = event.layer
                return self._predict(event.layer) if self._decoding else ()
            case PassRouted():
                uses = event.demanded if event.counts is None else event.counts
                self._eam += uses
                self._frequency += uses
            case _:
                pass
        return ()

    def _remember(self) -> None:
        """The sequence is over: keep its EAM, in the place of the one least matched if there is no other."""
        if len(self._collection) < CAPACITY:
            self._collection = np.concatenate([self._collection, self._eam[None]])
            self._matched.append(0)
        else:
            place = self._matched.index(min(self._matched))
            self._collection[place], self._matched[place] = self._eam, 0
        self._eam = np.zeros_like(self._eam)

    def _find_matches(self) -> NDArray[np.intp] | None:
        """For every layer l the collected EAM nearest to this one by the rows after l. (Masked rows are alike
        in all, so they do not decide.) Rows after l do not change before layer l + 1 runs, so this is done
        once a step."""
        if not len(self._collection) or not self._eam.any():
            return None
        ours = self._eam + _LITTLE
        theirs = self._collection + _LITTLE
        ours = ours / np.linalg.norm(ours, axis=-1, keepdims=True)
        theirs = theirs / np.linalg.norm(theirs, axis=-1, keepdims=True)
        cosine = (theirs * ours).sum(-1)  # (collected, L)
        after = cosine[:, ::-1].cumsum(axis=1)[:, ::-1] - cosine
        best: NDArray[np.intp] = after.argmax(axis=0)
        self._matched[int(best[0])] += 1
        return best

    def _predict(self, layer: int) -> Sequence[PrefetchRequest]:
        if self._match_of is None or layer + 1 >= self.shape.num_layers:
            return ()
        counts = self._collection[self._match_of[layer], layer + 1 :]
        counts = counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True))
        distance = np.arange(1, len(counts) + 1)[:, None]
        p = (counts + _LITTLE) * (1.0 - distance / (self.shape.num_layers + 1))
        p = np.where((counts > 0) & ~self._residency()[layer + 1 :], p, 0.0).ravel()
        order = np.argsort(-p, kind="stable")[: _AT_ONCE * self.shape.experts_per_token]
        order = order[p[order] > 0]
        return [
            PrefetchRequest(
                ExpertKey(layer + 1 + place // counts.shape[1], place % counts.shape[1]), deadline=-value
            )
            for place, value in zip(order.tolist(), p[order].tolist(), strict=True)
        ]

    def _worth(self) -> NDArray[np.float64]:
        """(L, E): frequency x share in this sequence x nearness of the layer, counted around the end."""
        layers = self.shape.num_layers
        shares = self._eam / np.maximum(1.0, self._eam.sum(axis=1, keepdims=True))
        distance = (np.arange(layers) - max(self._layer, 0)) % layers
        nearness = 1.0 - distance / (layers + 1)
        worth: NDArray[np.float64] = self._frequency * (shares + _LITTLE) * nearness[:, None]
        return worth

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """A free slot, else whom is worth least; the memory spares what is read, and unused prefetches."""
        if room.num_free:
            return None
        if self._rows is None:
            self._rows = self._worth().tolist()
        rows = self._rows
        return min(room.candidates, key=lambda key: rows[key.layer][key.expert], default=None)

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """Worth, as seen from the first layer."""
        self._layer = -1
        return KeepScores(self._worth().astype(np.float32), per_layer=False)
