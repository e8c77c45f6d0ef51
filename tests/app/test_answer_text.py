"""An answer's text while it grows: who wrote what, how long the model thought, and where it can go on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.answer_html import WAITING, answer_parts
from app.answer_text import AnswerText, cut_runs, to_continue, unfinished
from app.chat_file import Chat
from app.chat_tree import ChatMessage, MessageTree
from app.context_meter import context_use, meter_html
from app.requests import request_messages
from app.texts import IN_CHINESE
from app.typed import Typed
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.types import Message

STATS = GenerationCounters().freeze()


def event(pieces: Sequence[str], drafted: int = 0, *, opens: bool = False) -> StreamEvent:
    ids = tuple(range(len(pieces)))
    return StreamEvent("".join(pieces), ids, drafted, None, STATS, (), tuple(pieces), opens)


def owners(runs: Sequence[int]) -> list[bool]:
    """Whether the draft wrote it, for each character."""
    return [bool(place % 2) for place, run in enumerate(runs) for _ in range(run)]


steps = st.lists(
    st.lists(st.tuples(st.text(max_size=3), st.booleans()), max_size=4), max_size=8
)  # (text, drafted)


@given(steps, st.integers(0, 30))
@settings(max_examples=80)
def test_every_character_is_whose_it_was(steps: list[list[tuple[str, bool]]], cut: int) -> None:
    """Against a list with one entry a character, also after going on with the first `cut` of them."""
    text, expected = AnswerText(None), list[bool]()
    for step in steps:
        ordered = sorted(step, key=lambda token: not token[1])  # the drafted ones first
        text.add(event([piece for piece, _ in ordered], sum(drafted for _, drafted in step)))
        expected += [drafted for piece, drafted in ordered for _ in piece]
    assert owners(text.runs()) == expected and len(text.text()) == len(expected)
    message = ChatMessage("assistant", text.text()[:cut], runs=cut_runs(text.runs(), cut))
    assert owners(message.runs) == expected[:cut]
    if message.content:
        more = AnswerText(message)
        more.add(event(["a", "bc"], 1))
        assert more.text() == message.content + "abc"
        assert owners(more.runs()) == [*expected[:cut], True, False, False]


def test_what_goes_on_after_a_text_of_unknown_origin_is_not_coloured() -> None:
    more = AnswerText(ChatMessage("assistant", "from an older version"))
    more.add(event(["a"], 1))
    assert more.runs() == ()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_thinking_is_timed_from_the_first_token_to_the_closing_tag() -> None:
    clock = Clock()
    text = AnswerText(None, clock)
    clock.now += 5.0  # the prompt
    for piece, seconds in (
        ("<thi", 0.0),
        ("nk>", 0.0),
        ("well", 2.0),
        ("</think>", 3.0),
        ("yes", 0.0),
        ("!", 9.0),
    ):
        clock.now += seconds
        text.add(event([piece]))
    assert text.thought_s == pytest.approx(5.0) and text.text() == "<think>well</think>yes!"
    more = AnswerText(ChatMessage("assistant", "<think>we", thought_s=4.0), clock)
    more.add(event(["ll"], opens=True))  # the tag is there already
    clock.now += 1.5
    more.add(event(["</think>ok"]))
    assert more.thought_s == pytest.approx(5.5) and more.text() == "<think>well</think>ok"
    opened = AnswerText(None, clock)
    opened.add(event(["hm"], opens=True))
    assert opened.text() == "<think>hm" and owners(opened.runs()) == [False] * 9
    plain = AnswerText(None, clock)
    plain.add(event(["no"]))
    clock.now += 7
    plain.add(event([" thoughts <think>"]))
    assert plain.thought_s == 0.0


@pytest.mark.parametrize(
    ("finish", "content", "yes"),
    [("length", "a", True), ("cancelled", "a", True), (None, "a", True), ("error", "a", True),
     ("stop", "a", False), ("length", "", False), ("cancelled", " \t", False)],
)  # fmt: skip
def test_only_answers_that_did_not_end_by_themselves_go_on(
    finish: str | None, content: str, yes: bool
) -> None:
    assert unfinished(ChatMessage("assistant", content, finish=finish)) is yes
    assert not unfinished(ChatMessage("user", content, finish=finish))


def test_an_answer_goes_on_from_its_last_whole_word() -> None:
    kept = to_continue(
        ChatMessage("assistant", "a b\n  \ufffd", finish="length", runs=(1, 4, 2), thought_s=2.0)
    )
    assert (kept.content, kept.runs, kept.thought_s) == ("a b\n", (1, 3), 2.0)


def test_thoughts_are_folded_escaped_and_say_how_long_they_took() -> None:
    text = "<think>a <b>\n\n$$x$$ </details> & ```</think>\n\nIt is **four**."
    folded, answer = answer_parts(text, 3.25, (), False)
    assert folded.startswith('<details class="lm-think"><summary>Thought for 3.25 s</summary><pre>')
    assert "\n" not in folded and folded.count("<") == 6 and answer == "It is **four**."
    inside = re.search("<pre>(.*)</pre>", folded)
    assert inside is not None and unescape(inside[1]) == "a <b>\n\n$$x$$ </details> & ```"
    (running,) = answer_parts("<think>a", 12.4, (), True)
    assert "<summary>Thinking … 12 s</summary>" in running
    assert "Stopped while thinking, after 2.0 min" in answer_parts("<think>a", 120, (), False)[0]
    assert "思考了 3.25 s" in answer_parts(text, 3.25, (), False, IN_CHINESE)[0]
    assert answer_parts("<think>a</think>", 1, (), True)[1:] == [WAITING]
    assert answer_parts("", 0, (), True) == [WAITING] and answer_parts("", 0, (), False) == []


@given(st.text(max_size=30), st.lists(st.integers(0, 6), max_size=9), st.booleans())
def test_colours_change_no_character(answer: str, lengths: list[int], thinks: bool) -> None:
    text = "<think>hm</think>" + answer.lstrip() if thinks else answer
    runs = cut_runs([*lengths, *([0] if len(lengths) % 2 else []), len(text)], len(text))
    expected = owners(runs)
    parts = answer_parts(text, 1.0, runs, False)
    if not parts[thinks:]:
        return
    html = parts[thinks]
    inner = html.removeprefix('<pre class="lm-tokens">').removesuffix("</pre>")
    shown = [(unescape(piece), bool(i % 2)) for i, piece in enumerate(re.split("</?mark>", inner))]
    drafted = [mark for piece, mark in shown for _ in piece]
    visible = text[17:] if thinks else text
    if "\r" not in visible and "&" not in visible:
        assert "".join(piece for piece, _ in shown) == visible
        assert drafted == expected[len(text) - len(visible) :]
    assert "\n" not in html and len(re.findall("<(?!/?(mark|pre))", html)) == 0


def test_thoughts_and_turns_without_an_answer_are_not_given_back() -> None:
    messages = (
        ChatMessage("user", "one"), ChatMessage("assistant", "<think>\nhm\n</think>\n\ntwo"),
        ChatMessage("user", "cut"), ChatMessage("assistant", "<think>hm"),
        ChatMessage("user", "three"),
    )  # fmt: skip
    assert request_messages(messages, "", lambda picture: b"") == (
        Message("user", "one"), Message("assistant", "two"), Message("user", "three"),
    )  # fmt: skip


def chat_with(prompt: int, new: int, content: str = "an answer") -> Chat:
    stats = {"prompt_tokens": prompt, "new_tokens": new}
    turn = (ChatMessage("user", "q"), ChatMessage("assistant", content, finish="stop", stats=stats))
    return Chat("a" * 32, "t", 0, 0, MessageTree.line(turn))


@pytest.mark.parametrize(
    ("used", "begins"),
    [
        (1000, "1,000 of 4,096 tokens used; 3,096 are left for your next message"),
        (3072, "3,072 of 4,096 tokens used; 1,024 are left"),
        (3073, "Nearly full: 1,023 of 4,096 tokens are left"),
        (4079, "Nearly full: 17 of 4,096"),
        (4080, "The context of 4,096 tokens is full: another message would be refused."),
        (5000, "The context of 4,096 tokens is full"),  # it was loaded with a shorter one
    ],
)
def test_the_meter_warns_before_the_context_is_full(used: int, begins: str) -> None:
    html = meter_html(context_use(chat_with(used - 10, 10), 4096), 2048)
    assert begins in html and ("status" in html) == (used > 3072)


def test_the_meter_leaves_out_thoughts_and_says_so() -> None:
    use = context_use(chat_with(100, 200, "<think>" + "x" * 143 + "</think>" + "y" * 42), 4096)
    assert use is not None and (use.used, use.about) == (100 + round(200 * 42 / 200), True)
    assert "about 142 of 4,096 tokens used; about 3,954 are left" in meter_html(use, 512)
    assert meter_html(context_use(None, 4096), 512) == ""


@pytest.mark.parametrize(
    ("typed", "begins"),
    [
        (Typed(96), "1,096 of 4,096 tokens used, with 96 of your message; 3,000 are left for its answer"),
        (
            Typed(2100, True),
            "about 3,100 of 4,096 tokens used, with 2,100 of your message; about 996 are left",
        ),
        (Typed(3080), "Your message is too long: 3,096 of 4,096 tokens are left for it and its answer."),
        (Typed(9000, True), "Your message is too long: 3,096 of 4,096 tokens are left"),
    ],
)
def test_the_meter_counts_what_is_being_written(typed: Typed, begins: str) -> None:
    html = meter_html(context_use(chat_with(990, 10), 4096, typed), 2048)
    assert begins in html and ("nearly" in html) == (typed.tokens == 2100)
    assert ("status" in html) == (typed.tokens > 3000)  # a screen reader is not told of every key
    full = meter_html(context_use(chat_with(4080, 10), 4096, typed), 2048)
    assert "The context of 4,096 tokens is full" in full
