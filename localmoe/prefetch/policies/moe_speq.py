"""moe-speq: prefetch what the draft's routing says the verify pass will need (MoE-SpeQ 3.3), and evict by
lookahead.

Three phases over a window of drafted tokens (3.3.2). Priming: what is here and needed is protected, and the
first token's experts are fetched. Bandwidth-guided prefetch: of later tokens, experts that the router is
confident of or that several tokens want. Saturation: drafting is done, and everything else may come. In each
phase no more is asked for than the link can copy by the next decision, or before the layer that needs it
runs: what is asked for earlier makes room among experts that later tokens may turn out to need, and gains
nothing, since the link is busy anyway. What is held back is asked for when its time comes, or read by the
layer itself. Copies are ordered by the layer that needs them first. Where the CPU computes part of what a
pass misses, a pass keeps the link busy by itself, and shares what is missing between the two such that both
end together: then only what can be copied while drafting is asked for. Where asking for a copy takes the host
longer than the link needs to read the expert (tiny experts), nothing is.

Eviction: what the window needs stays (Belady's rule within it); beyond it the expert goes that is worth least
(prefetch.reuse), first from layers that hold more than their share of the slots. With drafting off only these
rules remain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localmoe.core.events import (
    DraftFinished,
    DraftRouted,
    Event,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefetchRequest,
    PrefillStarted,
    Rates,
    RatesMeasured,
    RoomWanted,
    StepFinished,
    StepStarted,
    TokenRouted,
)
from localmoe.core.types import ExpertKey
from localmoe.prefetch.policy import CacheShape, KeepScores, PolicyBase
from localmoe.prefetch.reuse import ReuseScores
from localmoe.prefetch.window_needs import WindowNeeds

_MANY = 1e6
_OVER_SHARE = 1e3  # more than any worth: experts of layers above their share go first


class MoeSpeqPolicy(PolicyBase):
    """Needs of the window, worth beyond it, and what was asked for."""

    name = "moe-speq"

    def __init__(self, shape: CacheShape) -> None:
        from localmoe.prefetch import loops  # compiles; not needed before there is a policy

        super().__init__(shape)
        self._loops = loops
        cells = (shape.num_layers, shape.num_experts)
        self._needs = WindowNeeds(*cells)
        self._reuse = ReuseScores(*cells, shape.num_slots)
        self._requested = np.zeros(cells, dtype=np.bool_)
        self._num_requested = 0
        self._drafting = 0  # tokens that this step drafts
        self._demanded = np.zeros(cells, dtype=np.bool_)  # by the pass at hand
        self._pass_runs = False  # something was demanded that is not learnt from yet
        self._shares = np.zeros(cells)  # of a prompt's tokens that use each
        self._prompt_tokens = 0  # of a prompt's pass that is not learnt from yet
        self._rates: Rates = shape.rates
        self._here = np.zeros(cells, dtype=np.bool_)  # as looked up last
        self._worth_rows: list[list[float]] | None = None  # what choose_victim goes by; None: to be made
        # of every cell, since making some thirty a step takes longer than choosing them
        keys = [ExpertKey(layer, expert) for layer in range(cells[0]) for expert in range(cells[1])]
        self._request_of = [PrefetchRequest(key, float(key.layer)) for key in keys]

    @property
    def asks_after_drafts(self) -> bool:
        """Not where the CPU helps, nor where copies do not pay."""
        return not self._rates.cpu_helps and self._rates.copies_pay

    def observe(self, event: Event) -> Sequence[PrefetchRequest]:
        """Collect needs while the draft runs and turn them into requests phase by phase."""
        if not isinstance(event, DraftRouted):
            self._worth_rows = None
        match event:
            case StepStarted():
                self._learn_prompt()
                self._needs.clear()
                self._requested[:] = False
                self._num_requested = 0
                self._drafting = event.draft_length
            case DraftRouted():
                self._needs.add_layer(event.token, event.layer, event.experts, event.confidences)
                self._keep(event.layer, event.experts)
                return self._while_drafting(event.token, event.layer)
            case TokenRouted():
                self._needs.add_token(event.token, event.experts, event.confidences)
                if event.last:
                    self._drafting = event.token + 1
                return self._while_drafting(event.token, None)
            case DraftFinished():
                return self._before_verify()
            case LayerDemanded():
                self._pass_runs = True
                self._demanded[event.layer, list(event.experts)] = True
                if self._prompt_tokens and event.counts:
                    self._shares[event.layer, list(event.experts)] = event.counts
            case LayerFinished():
                self._needs.layer_done(event.layer)
            case PrefillStarted():
                self._learn_prompt()
                self._prompt_tokens = event.num_tokens
            case PassRouted():
                self._pass_runs = True
                self._demanded[:] = event.demanded
                if self._prompt_tokens and event.counts is not None:
                    self._shares[:] = event.counts
                self._needs.wanted[:] = 0
            case StepFinished():
                self._reuse.learn_step(self._demanded, self._needs.routed, event.accepted, event.drafted)
                self._demanded[:] = self._pass_runs = False
            case RatesMeasured():
                self._rates = event.rates
        return ()

    def _learn_prompt(self) -> None:
        """What a prompt's last pass used, once it is over."""
        if not self._pass_runs and not self._prompt_tokens:
            return
        if self._pass_runs:
            tokens = max(1, self._prompt_tokens)
            shares = self._shares / tokens if self._shares.any() else None
            self._reuse.learn_prompt(self._demanded, shares, tokens)
        self._demanded[:] = self._pass_runs = False
        self._shares[:] = 0.0
        self._prompt_tokens = 0

    # -- requests

    def _while_drafting(self, token: int, layer: int | None) -> Sequence[PrefetchRequest]:
        """Phases I and II: what is sure, as far as the link can copy it until the next token is heard of."""
        rates, needs = self._rates, self._needs
        if not rates.copies_pay:
            return ()
        if rates.cpu_helps and token + 1 >= self._drafting:
            return ()  # what is asked for now would be copied during the verify pass
        if rates.copy_s and rates.draft_token_s is not None:
            room = int((token + 1) * rates.draft_token_s / rates.copy_s + 1) - self._num_requested
            if room <= 0:
                return ()
        else:
            room = needs.wanted.size  # nothing is known of the link
        here = self._look()
        if layer is None:
            quota = self._reuse.quota()
            return self._requests(self._loops.pick_sure(needs.sure, here, self._requested, quota, room))
        missing = needs.sure[layer] > (here[layer] | self._requested[layer])
        experts = (missing & (needs.wanted[layer] > 0)).nonzero()[0][:room]
        self._requested[layer, experts] = True
        return self._requests(layer * needs.wanted.shape[1] + experts)

    def _before_verify(self) -> Sequence[PrefetchRequest]:
        """Phase III: everything else that can be copied before its layer runs."""
        if not self.asks_after_drafts:
            return ()
        rates, copies_per_layer = self._rates, -1.0
        if rates.copy_s and rates.target_layer_s is not None:
            copies_per_layer = min(rates.target_layer_s / rates.copy_s, _MANY)
        pick = self._loops.pick_in_time
        return self._requests(pick(self._needs.wanted, self._look(), self._requested, copies_per_layer))

    def _look(self) -> NDArray[np.bool_]:
        """(L, E): in a slot, or on its way there."""
        self._here[:] = self._residency()
        return self._here

    def _requests(self, cells: NDArray[np.int64]) -> Sequence[PrefetchRequest]:
        """For cells that were marked as asked for, in this order; ordered by the layer that needs them."""
        self._num_requested += len(cells)
        return [self._request_of[cell] for cell in cells.tolist()]

    # -- eviction

    def _worth(self) -> NDArray[np.float32]:
        """(L, E): the lowest goes first; infinite for what the window needs."""
        worth = np.empty(self._demanded.shape, np.float32)
        self._loops.worth_now(
            self._reuse.worth(), self._look(), self._reuse.quota(), self._demanded, self._needs.wanted,
            _OVER_SHARE, worth,
        )  # fmt: skip
        return worth

    def _keep(self, layer: int, experts: Sequence[int]) -> None:
        """Bring what choose_victim goes by up to a drafted layer."""
        if self._worth_rows is not None:
            row = self._worth_rows[layer]
            for expert in experts:
                if 0 <= expert < len(row):
                    row[expert] = np.inf

    def choose_victim(self, room: RoomWanted) -> ExpertKey | None:
        """What the window does not need, by worth. Where it needs all, a demand displaces what is needed
        last, and a prefetch waits."""
        if room.num_free:
            return None
        if self._worth_rows is None:
            self._worth_rows = self._worth().tolist()
        rows = self._worth_rows
        worths = [rows[layer][expert] for layer, expert in room.candidates]
        least = min(worths, default=np.inf)
        if least < np.inf:
            return room.candidates[worths.index(least)]  # ties: the first is the least recently used
        return max(room.candidates, key=lambda key: key.layer, default=None) if room.is_demand else None

    def keep_scores(self, last_use: NDArray[np.int64]) -> KeepScores:
        """Worth; what the window needs stays."""
        return KeepScores(self._worth(), per_layer=False)
