"""The lookahead buffer against a plain table of what was recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.core.lookahead import LookaheadBuffer, LookaheadEntry
from localmoe.core.types import ExpertKey

LAYERS = 4
routings = st.lists(  # [token][layer] -> experts; a token may have skipped layers
    st.dictionaries(
        st.integers(0, LAYERS - 1), st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1
    ),
    max_size=6,
)


def entry(*experts: int) -> LookaheadEntry:
    return LookaheadEntry(tuple(experts), tuple(1.0 / (i + 1) for i in range(len(experts))))


@given(routings)
def test_the_buffer_remembers_exactly_what_was_recorded(window: list[dict[int, list[int]]]) -> None:
    buffer = LookaheadBuffer(LAYERS)
    for token, layers in enumerate(window):
        for layer, experts in layers.items():
            buffer.record(token, layer, entry(*experts))
    assert buffer.num_tokens == len(window)
    for token in range(len(window) + 2):
        for layer in range(LAYERS):
            wanted = window[token].get(layer) if token < len(window) else None
            assert buffer.get(token, layer) == (None if wanted is None else entry(*wanted))
    for layer in range(LAYERS):
        assert buffer.layer_experts(layer) == {e for layers in window for e in layers.get(layer, [])}
    keys = list(buffer.keys())
    expected = {
        ExpertKey(layer, e) for layers in window for layer, experts in layers.items() for e in experts
    }
    assert keys == sorted(expected)  # distinct, and by layer


def test_a_cleared_buffer_is_empty_and_starts_at_token_zero_again() -> None:
    buffer = LookaheadBuffer(LAYERS)
    buffer.record(0, 0, entry(1))
    buffer.record(1, 0, entry(2))
    buffer.clear()
    assert (buffer.num_tokens, buffer.get(0, 0), list(buffer.keys())) == (0, None, [])
    buffer.record(0, 3, entry(5))
    assert buffer.layer_experts(3) == {5}
    assert buffer.layer_experts(0) == frozenset()


def test_a_second_record_of_a_token_and_layer_replaces_the_first() -> None:
    buffer = LookaheadBuffer(LAYERS)
    buffer.record(0, 1, entry(1, 2))
    buffer.record(0, 1, entry(3, 4))
    assert buffer.get(0, 1) == entry(3, 4)
    assert buffer.layer_experts(1) == {3, 4}


@pytest.mark.parametrize(("token", "layer"), [(1, 0), (-1, 0), (0, LAYERS), (0, -1)])
def test_tokens_out_of_order_and_layers_that_do_not_exist_are_programming_errors(
    token: int, layer: int
) -> None:
    with pytest.raises(AssertionError):
        LookaheadBuffer(LAYERS).record(token, layer, entry(0))
