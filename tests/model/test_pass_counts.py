"""The counters of a whole pass against a loop over its tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.experts.pass_report import PassReport
from localmoe.model.pass_counts import count_window

EXPERTS = 6


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 6),
)  # fmt: skip
def test_a_pass_is_counted_as_a_loop_would(
    seed: int, layers: int, tokens: int, top_k: int, drafted: int
) -> None:
    chance = np.random.default_rng(seed)

    def routing(rows: int) -> np.ndarray:  # some are no experts
        order = chance.random((layers, rows, EXPERTS + 2)).argsort(axis=2)[..., :top_k]
        return np.where(order == EXPERTS + 1, -1, order).astype(np.int32)

    experts, draft = routing(tokens), routing(drafted)
    agrees = chance.random((layers, drafted)) < 0.5
    for layer, token in np.argwhere(agrees[:, :tokens]):  # the same experts in another order
        draft[layer, token] = chance.permutation(experts[layer, token])
    kind = chance.choice([0, 1, 2, 3, 6], (layers, EXPERTS))
    found = PassReport(kind == 1, kind == 2, kind == 3, kind == 6, np.zeros(len(kind), dtype=np.int64))
    lookahead = LookaheadBuffer(layers)
    for token in range(drafted):
        lookahead.record_token(draft[:, token], np.zeros((layers, top_k), dtype=np.float32))
    counters = GenerationCounters(hits=100, token_hits=10, routed_pairs=5, matched_pairs=3)
    count_window(counters, lookahead, found, experts)

    demands = hits = pairs = matched = ordered = 0
    for layer in range(layers):
        for token in range(tokens):
            chosen = [e for e in experts[layer, token].tolist() if 0 <= e < EXPERTS]
            demands += len(chosen)
            hits += sum(bool(found.hits[layer, e]) for e in chosen)
            if token < drafted:
                pairs += 1
                matched += sorted(draft[layer, token].tolist()) == sorted(experts[layer, token].tolist())
                ordered += draft[layer, token].tolist() == experts[layer, token].tolist()
    assert counters.hits == 100 + int((kind == 1).sum())
    assert (counters.late, counters.misses) == (int((kind == 2).sum()), int((kind == 3).sum()))
    assert (counters.token_demands, counters.token_hits) == (demands, 10 + hits)
    assert (counters.routed_pairs, counters.matched_pairs) == (5 + pairs, 3 + matched)
    assert counters.ordered_pairs == ordered
    covered = 0
    for layer, expert in np.ndindex(layers, EXPERTS):
        named = any(expert in draft[layer, token] for token in range(min(tokens, drafted)))
        covered += bool(kind[layer, expert] in (1, 2) or (kind[layer, expert] in (3, 6) and named))
    assert counters.covered == covered


def test_without_a_draft_no_pair_is_counted() -> None:
    counters = GenerationCounters()
    nothing = np.zeros((2, EXPERTS), dtype=np.bool_)
    experts = np.zeros((2, 3, 1), dtype=np.int32)
    count_window(
        counters,
        LookaheadBuffer(2),
        PassReport(nothing, nothing, nothing, nothing, nothing.sum(axis=1)),
        experts,
    )
    assert (counters.routed_pairs, counters.token_demands, counters.token_hits) == (0, 6, 0)
