"""How many tokens of a prompt go through in a pass: the faster way, once both are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.model.prompt_ways import BEFORE_THE_END, WINDOW, PromptWays

LONGEST = 1024
MISSING = 4000


def passes(
    ways: PromptWays, tokens: int, window_s: float, stream_s: float, missing: int = MISSING
) -> list[int]:
    """Of a prompt, where a full window takes so long, a shorter one as the root of its length less, and a
    longer pass `stream_s`."""
    found = []
    while tokens:
        rows = ways.rows(tokens, LONGEST, missing)
        ways.note(rows, missing, stream_s if rows > WINDOW else window_s * (rows / WINDOW) ** 0.5)
        found.append(rows)
        tokens -= rows
    return found


def seconds(found: list[int], window_s: float, stream_s: float) -> float:
    return sum(stream_s if rows > WINDOW else window_s * (rows / WINDOW) ** 0.5 for rows in found)


@given(
    st.booleans(), st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.floats(0.001, 2),
    st.floats(0.001, 2), st.integers(0, MISSING),
)  # fmt: skip
def test_all_of_a_prompt_is_run_and_its_end_can_be_gone_back_to(
    helped: bool, prompts: list[int], window_s: float, stream_s: float, missing: int
) -> None:
    ways = PromptWays(helped=helped)
    for tokens in prompts:
        found = passes(ways, tokens, window_s, stream_s, missing)
        assert sum(found) == tokens and max(found) <= LONGEST
        in_windows = all(rows <= WINDOW for rows in found)
        assert not in_windows or len(found) == 1 or found[-1] >= BEFORE_THE_END
        if not missing:  # nothing has to come
            assert len(found) == -(-tokens // LONGEST)


@pytest.mark.parametrize(("window_s", "most"), [(0.13, 280), (0.3, 140), (0.7, 0)])
def test_windows_go_as_far_as_they_are_faster(window_s: float, most: int) -> None:
    """One stream takes 0.65 s, however many tokens it is for."""
    ways = PromptWays(helped=True)
    passes(ways, 60, window_s, 0.65)
    passes(ways, 900, window_s, 0.65)
    for tokens in range(WINDOW + 1, 600, 9):
        found = passes(ways, tokens, window_s, 0.65)
        if max(found) <= WINDOW:
            assert tokens < 1.3 * most and seconds(found, window_s, 0.65) < 0.65
        else:
            assert tokens > most and found == [tokens]


def test_what_a_window_takes_is_tried_where_the_cpu_helps_and_else_not() -> None:
    assert passes(PromptWays(helped=True), 2 * WINDOW, 0.1, 0.5) == [WINDOW, WINDOW]
    assert passes(PromptWays(helped=False), 2 * WINDOW, 0.1, 0.5) == [2 * WINDOW]
    alone = PromptWays(helped=False)
    passes(alone, 200, 0.1, 0.5)
    passes(alone, 60, 0.1, 0.5)  # a short prompt tells
    assert passes(alone, 2 * WINDOW, 0.1, 0.5) == [WINDOW, WINDOW]


def test_the_fewer_are_missing_the_sooner_a_stream_is_faster() -> None:
    ways = PromptWays(helped=True)
    passes(ways, 60, 0.1, 0.6)
    passes(ways, 900, 0.1, 0.6)
    assert max(passes(ways, 200, 0.1, 0.6)) == WINDOW
    assert passes(ways, 200, 0.1, 0.6, MISSING // 4) == [200]


def test_another_budget_is_learnt_anew() -> None:
    ways = PromptWays(helped=False)
    passes(ways, 900, 0.1, 0.6)
    passes(ways, 60, 0.1, 0.6)
    assert max(passes(ways, 200, 0.1, 0.6)) == WINDOW
    ways.forget()
    assert passes(ways, 200, 0.1, 0.6) == [200]


def test_the_end_of_a_long_prompt_is_a_window() -> None:
    ways = PromptWays(helped=True)
    assert passes(ways, LONGEST + 50, 0.1, 0.6) == [LONGEST, 50]
    assert passes(ways, 2 * LONGEST + 100, 0.1, 0.6) == [
        LONGEST,
        LONGEST,
        100 - BEFORE_THE_END,
        BEFORE_THE_END,
    ]
