"""Text that is cut or told apart while it comes in is the same as of the whole text, in whatever pieces it
comes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from localmoe.chat.reasoning import split_reasoning
from localmoe.chat.thought_stream import ThoughtStream
from localmoe.server.stops import StopCutter

PIECES = st.lists(st.text("abc", max_size=5), max_size=8)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)
TAGGED = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "<", " ", "\n", "a", "b c", "think>", ""])
    | st.text("<>/think \n", max_size=3),
    max_size=12,
)


def cut(text: str, stops: list[str]) -> tuple[str, str]:
    """Character by character: up to the first stop string that is complete, the longest if there are more."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, ""


@given(PIECES, STOPS)
@example(["a", "b", "c", "a"], ["abcb", "bc"])
@example(["ab", "ab", "c"], ["abc"])
@settings(max_examples=400)
def test_an_answer_is_cut_at_the_first_stop_string_and_nothing_is_held_back_in_vain(
    pieces: list[str], stops: list[str]
) -> None:
    cutter, sent, whole = StopCutter(stops), "", ""
    for piece in pieces:
        sent, whole = sent + cutter.add(piece), whole + piece
        expected, found = cut(whole, stops)
        assert cutter.found == found
        if found:
            assert sent == expected
        else:
            held = whole.removeprefix(sent)
            longest = [
                n
                for n in range(len(whole) + 1)
                for stop in stops
                if whole.endswith(stop[:n]) and n < len(stop)
            ]
            assert whole.startswith(sent) and len(held) == max(longest, default=0)
    sent += cutter.finish()
    assert (sent, cutter.found) == cut(whole, stops)


@given(TAGGED)
@example(["<think>", " a ", "\n", "</think>", "\n\n", "<think>", "b", "</think>", "c"])
@example([" ", "<think"])
@example(["<think>", "a ", "</th", "ink"])
@settings(max_examples=600)
def test_thoughts_come_apart_as_in_the_whole_text(pieces: list[str]) -> None:
    stream, thoughts, answer, whole = ThoughtStream(), "", "", ""
    for piece in pieces:
        new = stream.add(piece)
        thoughts, answer, whole = thoughts + new.thoughts, answer + new.answer, whole + piece
        so_far = split_reasoning(whole)
        assert so_far.thoughts.startswith(thoughts)
        if so_far.finished and answer:
            assert answer == so_far.answer  # nothing of an answer that has begun is held back
    rest = stream.finish()
    split = split_reasoning(whole)
    assert (thoughts + rest.thoughts, answer + rest.answer) == (split.thoughts, split.answer)
