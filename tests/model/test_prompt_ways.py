"""How many tokens of a prompt go through in a pass, and how their experts come: the faster way, once both are
known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localmoe.model.prompt_ways import BEFORE_THE_END, MOST_ASKED, WINDOW, PromptWays

LONGEST = 3072
MISSING = 4000


def passes(
    ways: PromptWays, tokens: int, window_s: float, stream_s: float, missing: int = MISSING
) -> list[tuple[int, str]]:
    """Of a prompt, where a full window takes so long, others that ask as the root of their length more or
    less, and one that streams `stream_s`."""
    found = []
    while tokens:
        rows = ways.rows(tokens, LONGEST, missing)
        streams = rows > WINDOW and not ways.asks(rows, missing)
        if streams:
            ways.note_streamed(rows, missing, stream_s)
        else:
            ways.note_asked(rows, window_s * (rows / WINDOW) ** 0.5)
        found.append((rows, "stream" if streams else "ask"))
        tokens -= rows
    return found


@given(
    st.booleans(), st.one_of(st.none(), st.floats(1e-6, 1e-3)),
    st.lists(st.integers(1, 9000), min_size=1, max_size=8), st.floats(0.001, 2), st.floats(0.001, 2),
    st.integers(0, MISSING), st.integers(WINDOW, MOST_ASKED),
)  # fmt: skip
def test_all_of_a_prompt_is_run_in_passes_that_there_is_room_for(
    tries: bool, copy_s: float | None, prompts: list[int], window_s: float, stream_s: float, missing: int,
    most: int,
) -> None:  # fmt: skip
    ways = PromptWays(tries=tries, copy_s=copy_s, most=most)
    for tokens in prompts:
        found = passes(ways, tokens, window_s, stream_s, missing)
        assert sum(rows for rows, _ in found) == tokens
        assert all(rows <= (most if way == "ask" else LONGEST) for rows, way in found)
        if len(found) > 1:
            assert found[-1][0] >= BEFORE_THE_END, "recurrent layers can go back to where the end begins"
        if not missing:  # nothing has to come
            assert len(found) == -(-tokens // LONGEST)


@pytest.mark.parametrize("missing", [0, MISSING])
def test_the_last_pass_is_no_shorter_than_what_a_template_ends_with(missing: int) -> None:
    for count in (1, 2):
        for more in range(1, BEFORE_THE_END + 2):
            found = passes(PromptWays(tries=False), count * LONGEST + more, 0.1, 0.5, missing)
            assert [rows for rows, _ in found[:-2]] == [LONGEST] * (count - 1)
            assert found[-1][0] == max(more, BEFORE_THE_END) and found[-2][0] <= LONGEST


@pytest.mark.parametrize("tries", [True, False])
@pytest.mark.parametrize(("window_s", "most"), [(0.13, 1300), (0.3, 270), (0.7, 0)])
def test_passes_ask_as_far_as_that_is_faster(window_s: float, most: int, tries: bool) -> None:
    """One that streams takes 0.65 s, however many tokens it is for; of each power of two of lengths one or
    two passes may show that it is faster."""
    ways, slower = PromptWays(tries=tries), 0
    passes(ways, 60, window_s, 0.65)
    ways.note_streamed(900, MISSING, 0.65)
    for tokens in range(WINDOW + 1, MOST_ASKED, 9):
        ((rows, way),) = passes(ways, tokens, window_s, 0.65)
        asked_s = window_s * (tokens / WINDOW) ** 0.5
        if way == "ask":
            slower += asked_s >= 0.65 and tokens > 1.3 * most
        else:
            assert asked_s > 0.9 * 0.65 and rows == tokens
    assert slower <= (8 if tries else 0)


def test_what_asking_takes_of_more_tokens_is_tried_unless_it_is_sure_to_take_long() -> None:
    """Of random routing 72 tokens ask for all experts already."""
    for tries, first in ((True, "ask"), (False, "stream")):
        ways = PromptWays(tries=tries)
        ways.note_asked(WINDOW, 0.165)
        ways.note_streamed(900, MISSING, 0.29)
        assert ways.asks(256, MISSING) == (first == "ask")
        assert not ways.asks(900, MISSING)
        if tries:
            ways.note_asked(256, 0.21)
            assert ways.asks(256, MISSING) and ways.asks(900, MISSING)


def test_what_asking_takes_is_tried_where_the_cpu_helps_and_else_not() -> None:
    assert passes(PromptWays(tries=True), 2 * WINDOW, 0.1, 0.5) == [(2 * WINDOW, "ask")]
    assert passes(PromptWays(tries=True), 900, 0.1, 0.5) == [(900, "ask")]
    assert passes(PromptWays(tries=False), 2 * WINDOW, 0.1, 0.5) == [(2 * WINDOW, "stream")]
    alone = PromptWays(tries=False)
    passes(alone, 200, 0.1, 0.5)
    passes(alone, 60, 0.1, 0.5)  # a short prompt tells
    assert passes(alone, 2 * WINDOW, 0.1, 0.5) == [(2 * WINDOW, "ask")]


def test_a_link_that_was_measured_tells_what_a_stream_takes_before_one_is_run() -> None:
    for copy_s, way in ((0.1 / MISSING, "stream"), (0.6 / MISSING, "ask")):
        ways = PromptWays(tries=True, copy_s=copy_s)
        passes(ways, 60, 0.1, 0.6)
        assert passes(ways, 200, 0.1, 0.6) == [(200, way)]


def test_one_pass_that_happened_to_take_long_is_tried_once_more() -> None:
    ways = PromptWays(tries=True)
    ways.note_streamed(900, MISSING, 0.5)
    for seconds, asks in ((0.6, True), (0.25, True), (0.2, True)):
        ways.note_asked(200, seconds)
        assert ways.asks(200, MISSING) == asks
    bad = PromptWays(tries=True)
    bad.note_streamed(900, MISSING, 0.5)
    bad.note_asked(200, 0.6)
    bad.note_asked(200, 0.6)
    assert not bad.asks(200, MISSING) and not bad.asks(MOST_ASKED, MISSING)
    hopeless = PromptWays(tries=True)
    hopeless.note_streamed(900, MISSING, 0.5)
    hopeless.note_asked(200, 2.0)
    assert not hopeless.asks(200, MISSING)


def test_passes_that_took_long_now_and_then_do_not_end_it_but_five_in_a_row_do() -> None:
    ways = PromptWays(tries=True)
    ways.note_streamed(900, MISSING, 0.5)
    for seconds in (0.7, 0.4, 0.7, 0.7, 0.7, 0.4, 0.7, 0.7, 0.7, 0.7):
        ways.note_asked(200, seconds)
        assert ways.asks(200, MISSING)
    ways.note_asked(200, 0.7)
    assert not ways.asks(200, MISSING)


def test_the_fewer_are_missing_the_sooner_a_stream_is_faster() -> None:
    ways = PromptWays(tries=True)
    for _ in range(2):
        ways.note_asked(200, 0.17)
    ways.note_streamed(900, MISSING, 0.6)
    assert ways.asks(200, MISSING) and not ways.asks(200, MISSING // 4) and not ways.asks(200, 0)


def test_another_budget_is_learnt_anew() -> None:
    ways = PromptWays(tries=False)
    passes(ways, 900, 0.1, 0.6)
    passes(ways, 60, 0.1, 0.6)
    assert ways.asks(200, MISSING)
    ways.forget()
    assert not ways.asks(200, MISSING)


def test_a_long_prompt_asks_in_parts_where_those_together_are_faster_than_streams() -> None:
    ways = PromptWays(tries=True)
    ways.note_asked(MOST_ASKED, 0.2)
    ways.note_streamed(900, MISSING, 0.7)
    assert ways.rows(2 * MOST_ASKED + 100, LONGEST, MISSING) == MOST_ASKED
    assert ways.rows(LONGEST, LONGEST, MISSING) == MOST_ASKED  # 0.6 s and less than a tenth more
    assert ways.rows(LONGEST + 900, MOST_ASKED, MISSING) == MOST_ASKED
    assert ways.rows(MOST_ASKED + 5, LONGEST, MISSING) == MOST_ASKED + 5 - BEFORE_THE_END
    for _ in range(5):
        ways.note_asked(MOST_ASKED, 0.4)
    assert ways.rows(2 * MOST_ASKED + 100, LONGEST, MISSING) == 2 * MOST_ASKED + 100
