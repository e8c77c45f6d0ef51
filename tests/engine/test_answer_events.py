"""The events of an answer: the text of each token, and going on with an unfinished answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import load_with_slots

from localmoe.core.config import GenerationRequest
from localmoe.core.stats import GenerationCounters
from localmoe.core.stream import StreamEvent
from localmoe.core.tools import Tool
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine.answer import write_events
from localmoe.engine.meter import Meter
from localmoe.experts.counters import TransferCounters
from localmoe.hub.catalogue import demo_folder
from localmoe.speculative.loop import StepResult

TOKENIZER = transformers.AutoTokenizer.from_pretrained(demo_folder())


def events_of(steps: Sequence[Sequence[int]], prompt: Sequence[int], **more: Any) -> list[StreamEvent]:
    """A scripted answer that ends with its last step."""
    results = [StepResult(list(step), max(0, len(step) - 1), None) for step in steps]
    results.append(StepResult([], 0, "cancelled"))
    meter = Meter(GenerationCounters(), TransferCounters, lambda: 0, 0.0)
    request = GenerationRequest(prompt="a", **more)
    return list(write_events(results, prompt, None, TOKENIZER, meter, request))


@given(st.text(max_size=30), st.lists(st.integers(1, 6), max_size=20), st.integers(0, 3))
@settings(max_examples=40)
def test_the_pieces_of_a_step_are_its_tokens_texts(text: str, sizes: list[int], cut: int) -> None:
    """Against decoding the whole answer at once; `cut` tokens short of a whole character."""
    tokens: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    tokens = tokens[: len(tokens) - cut] if cut < len(tokens) else tokens
    steps, rest = [], tokens
    for size in sizes:
        steps, rest = [*steps, rest[:size]], rest[size:]
    events = events_of([*steps, rest], [1])
    assert [event.text for event in events] == ["".join(event.pieces) for event in events]
    assert "".join(event.text for event in events) == TOKENIZER.decode(tokens)
    for event in events[:-1]:
        assert len(event.pieces) == len(event.token_ids)
    assert len(events[-1].pieces) <= 1  # what was held back
    for place in range(len(tokens)):  # no piece is later than the first token that settles its text
        settled = TOKENIZER.decode(tokens[: place + 1])
        if not settled.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces = [piece for event in events for piece in event.pieces]
            assert "".join(pieces[: place + 1]) == settled


def test_an_answer_that_may_call_tools_says_in_which_notation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ tools }}<|tool_call>call:{{ messages }}")
    tools = (Tool("now", '{"name": "now"}'),)
    found = events_of([[300], [301]], [1], tools=tools)
    assert [event.tool_format for event in found] == ["gemma", "", ""]
    found = events_of([[300], [301]], [1], tools=tools, must_call=("now",))
    assert [event.tool_format for event in found] == ["forced", "", ""]
    assert not any(event.tool_format for event in events_of([[300], [301]], [1]))


def test_an_answer_that_begins_in_thoughts_says_so_once() -> None:
    opened = TOKENIZER("<|im_start|>assistant\n<think>\n", add_special_tokens=False)["input_ids"]
    assert [event.opens_reasoning for event in events_of([[300], [301]], opened)] == [True, False, False]
    assert not any(event.opens_reasoning for event in events_of([[300], [301]], opened[:-4]))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_with_slots("demo", 32) as loaded:
        yield loaded


def test_a_stopped_answer_goes_on_as_if_it_had_not_been_stopped(engine: Engine) -> None:
    """Greedy, and the keys and values of what was read and written are used again."""
    question = Message("user", "tell me a story about a fox")

    def ask(messages: tuple[Message, ...], count: int) -> list[StreamEvent]:
        goes_on = messages[-1].role == "assistant"
        request = GenerationRequest(messages, max_new_tokens=count, continue_answer=goes_on, draft_length=3)
        return list(engine.stream(request))

    whole = ask((question,), 40)
    begun = ask((question,), 16)
    text = "".join(event.text for event in begun)
    more = ask((question, Message("assistant", text)), 24)
    tokens = [token for event in begun for token in event.token_ids]
    assert list(more[0].prompt_token_ids) == [*begun[0].prompt_token_ids, *tokens]
    assert more[-1].stats.reused_tokens == len(more[0].prompt_token_ids) - 1
    assert text + "".join(event.text for event in more) == "".join(event.text for event in whole)
    drafted = [piece for event in whole for piece in event.pieces[: event.drafted]]
    assert sum(event.drafted for event in whole) == len(drafted) == whole[-1].stats.accepted > 0
