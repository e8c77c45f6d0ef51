"""The lookahead buffer against a plain table of what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from localmoe.core.lookahead import LookaheadBuffer, LookaheadEntry

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


def test_a_cleared_buffer_is_empty_and_starts_at_token_zero_again() -> None:
    buffer = LookaheadBuffer(LAYERS)
    buffer.record(0, 0, entry(1))
    buffer.record(1, 0, entry(2))
    buffer.clear()
    assert (buffer.num_tokens, buffer.get(0, 0)) == (0, None)
    buffer.record(0, 3, entry(5))
    assert buffer.get(0, 3) == entry(5) and buffer.get(0, 0) is None


def test_a_second_record_of_a_token_and_layer_replaces_the_first() -> None:
    buffer = LookaheadBuffer(LAYERS)
    buffer.record(0, 1, entry(1, 2))
    buffer.record(0, 1, entry(3, 4))
    assert buffer.get(0, 1) == entry(3, 4)


@pytest.mark.parametrize(("token", "layer"), [(1, 0), (-1, 0), (0, LAYERS), (0, -1)])
def test_tokens_out_of_order_and_layers_that_do_not_exist_are_programming_errors(
    token: int, layer: int
) -> None:
    with pytest.raises(AssertionError):
        LookaheadBuffer(LAYERS).record(token, layer, entry(0))


def tokens_of(window: list[list[list[int]]]) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """(L, K) experts and confidences of each token."""
    experts = [np.array(token, dtype=np.int32) for token in window]
    return [(rows, 1 / (1 + np.arange(rows.size, dtype=np.float32)).reshape(rows.shape)) for rows in experts]


layer_choices = st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)
windows = st.lists(st.lists(layer_choices, min_size=LAYERS, max_size=LAYERS), max_size=5)


@given(windows)
def test_tokens_recorded_as_a_whole_look_like_those_recorded_layer_by_layer(
    window: list[list[list[int]]],
) -> None:
    whole, by_layer = LookaheadBuffer(LAYERS), LookaheadBuffer(LAYERS)
    for token, (experts, confidences) in enumerate(tokens_of(window)):
        whole.record_token(experts, confidences)
        for layer in range(LAYERS):
            made = LookaheadEntry(tuple(experts[layer].tolist()), tuple(confidences[layer].tolist()))
            by_layer.record(token, layer, made)
    assert whole.num_tokens == by_layer.num_tokens == len(window)
    for token in range(len(window) + 1):
        for layer in range(LAYERS):
            assert whole.get(token, layer) == by_layer.get(token, layer)
    for token, chosen in enumerate(window):
        found = whole.token_experts(token)
        assert found is not None and found.tolist() == chosen
        assert by_layer.token_experts(token) is None
    assert whole.token_experts(len(window)) is None
    whole.clear()
    assert whole.num_tokens == 0 and whole.token_experts(0) is None


def test_a_token_is_recorded_in_one_way_and_for_all_layers() -> None:
    buffer = LookaheadBuffer(2)
    rows = np.zeros((2, 3), dtype=np.int32)
    buffer.record_token(rows, rows.astype(np.float32))
    with pytest.raises(AssertionError):
        buffer.record(0, 1, entry(0))
    buffer.record(1, 0, entry(4))
    buffer.record_token(rows, rows.astype(np.float32))
    assert buffer.num_tokens == 3
    with pytest.raises(AssertionError):
        buffer.record_token(rows[:1], rows[:1].astype(np.float32))
