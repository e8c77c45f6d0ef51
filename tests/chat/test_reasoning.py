"""Thoughts in a streamed text: tags, gpt-oss's channels, and going on in the middle of either."""

from __future__ import annotations

import time

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import DEMO, byte_level, channels, special_thoughts

from localmoe.chat.detokenise import Detokeniser
from localmoe.chat.harmony import HarmonyText, as_messages, harmony_marks
from localmoe.chat.reasoning import Reasoning, opens_reasoning, resumed, split_reasoning
from localmoe.chat.text_stream import text_stream
from localmoe.chat.thought_marks import ThoughtMarks, thought_marks


@pytest.mark.parametrize(
    ("text", "thoughts", "answer", "finished"),
    [
        ("<think>\na b\n</think>\n\nYes.\n", "a b", "Yes.\n", True),
        (" \n<think></think> Yes", "", "Yes", True),  # Qwen3 with thinking off
        ("<think>still at it", "still at it", "", False),
        ("<think>", "", "", False),
        ("<think>a</think>\n<think>b</think>c", "a\n\nb", "c", True),
        ("<think>a</think><think>b", "a\n\nb", "", False),
        ("<think>a <think> b</think>c</think>", "a <think> b", "c</think>", True),
        ("Use <think>x</think> tags", "", "Use <think>x</think> tags", True),
        ("  plain ", "", "  plain ", True),
        ("a</think>b", "", "a</think>b", True),
        ("", "", "", True),
    ],
)
def test_thoughts_are_the_tagged_blocks_at_the_beginning(
    text: str, thoughts: str, answer: str, finished: bool
) -> None:
    assert split_reasoning(text) == Reasoning(thoughts, answer, finished)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=12))
def test_the_answer_is_always_the_end_of_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    split = split_reasoning(text)
    assert text.endswith(split.answer)
    assert split.finished or not split.answer
    if not text.lstrip().startswith("<think>"):
        assert split == Reasoning("", text, True)


def encode(text: str) -> list[int]:
    ids: list[int] = channels()(text, add_special_tokens=False)["input_ids"]
    return ids


def stream(text: str, prompt: str, tool_format: str = "") -> str:
    made = text_stream(channels(), encode(prompt), tool_format)
    assert isinstance(made, HarmonyText)
    return "".join([*(made.add([token]) for token in encode(text)), made.finish()])


PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
         "<think>a b</think>yes"),
        ("<|channel|>final<|message|>yes<|return|>", "yes"),
        ("<|channel|>analysis<|message|>a", "<think>a"),
        ("<|channel|>analy", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>x<|channel|>commentary to y<|message|>b<|call|>",
         "<think>a</think><think>b</think>"),
        ("<|message|>yes<|end|>", "yes"),
    ],
)  # fmt: skip
def test_channels_become_tagged_thoughts(written: str, text: str) -> None:
    assert stream(written, PROMPT) == text


CALL = '<tool_call>{"name": "get_weather", "arguments": {a:1}}</tool_call>'


@pytest.mark.parametrize("end", ["<|call|>", "<|end|><|start|>assistant", ""])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>commentary to=functions.get_weather<|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>analysis to=functions.get_weather code",
    ],
)
def test_a_message_to_a_tool_is_a_call_of_it_where_tools_may_be_called(header: str, end: str) -> None:
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    written = f"{thought}{header}<|message|>{{a:1}}{end}"
    assert stream(written, PROMPT, "json") == f"<think>a</think>{CALL}"
    closed = "</think>" if end else ""
    assert stream(written, PROMPT) == f"<think>a</think><think>{{a:1}}{closed}"
    final = f"{written}<|channel|>final<|message|>b"
    if end and "start" in end:
        assert stream(final, PROMPT, "json") == f"<think>a</think>{CALL}b"


def test_messages_to_other_places_than_functions_are_thoughts_and_marks_in_texts_are_dropped() -> None:
    written = "<|channel|>analysis to=browser.open code<|message|>a<|constrain|>b<|call|>"
    assert stream(written, PROMPT, "json") == "<think>ab</think>"


plain = st.text(st.sampled_from("abc \n"), min_size=1, max_size=12).map(str.strip).filter(bool)


@given(plain, plain, st.integers(0, 30))
@example("ab", "c", 2)
@settings(max_examples=60)
def test_an_answer_in_channels_goes_on_wherever_it_was_cut(thoughts: str, answer: str, place: int) -> None:
    """The prompt of a continued answer is what the model had read and written, and the rest has the rest."""
    whole = f"<think>{thoughts}</think>{answer}"
    written = as_messages(whole)
    assert stream(written, PROMPT) == whole and encode(PROMPT + written)
    cuts = [*range(7, 8 + len(thoughts)), *range(len(whole) - len(answer), len(whole) + 1)]
    cut = whole[: cuts[place % len(cuts)]].rstrip()
    begun = as_messages(cut)
    assert written.startswith(begun)
    assert cut + stream(written[len(begun) :], PROMPT + begun) == whole


def test_tokenizers_without_channels_stream_as_before() -> None:
    assert harmony_marks(byte_level()) == {}
    assert isinstance(text_stream(byte_level(), [1]), Detokeniser)


def test_a_template_that_opens_the_thoughts_is_seen_and_not_repeated() -> None:
    tokenizer = byte_level()

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    assert opens_reasoning(tokenizer, ids("<|im_start|>assistant\n<think>\n"))
    assert not opens_reasoning(tokenizer, ids("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    assert not opens_reasoning(tokenizer, ids("<|im_start|>assistant\n"))
    assert resumed("A<think>\n", "<think>so far") == "A<think>\nso far"
    assert resumed("A", "<think>so far") == "A<think>so far"
    assert resumed("A<think>\n", "no tag") == "A<think>\n\n</think>\n\nno tag", "it is no thought"


def test_a_text_of_nothing_but_thoughts_is_read_in_time_in_proportion_to_it() -> None:
    text = "<think></think>" * 400_000 + "x"
    began = time.perf_counter()
    assert split_reasoning(text) == Reasoning("", "x", True)
    assert time.perf_counter() - began < 5, "copied at each block it would be minutes"


SPECIAL = [
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|channel>", "<channel|>", "thought\n"),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
]


@pytest.mark.parametrize(("opening", "closing", "label"), SPECIAL)
@pytest.mark.parametrize("tool_format", ["", "json"])
def test_marks_of_thoughts_that_decoding_drops_are_tags(
    opening: str, closing: str, label: str, tool_format: str
) -> None:
    tokenizer = special_thoughts(opening, closing)
    begun = opening + label
    for written, text in {
        f"{begun}so é\n{closing}Yes.": "<think>so é\n</think>Yes.",
        f"{begun}{closing}thought\n": "<think></think>thought\n",
        f"{begun}a{closing}\n{begun}b": "<think>a</think>\n<think>b",
        f"{begun}": "<think>", f"{opening}th": "<think>" + ("" if label else "th"),
        f"{opening}other\n": "<think>other\n",
        f"a{closing}b": "a</think>b", "thought\n": "thought\n",
    }.items():  # fmt: skip
        made = text_stream(tokenizer, [1], tool_format)
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        assert "".join([*(made.add([token]) for token in ids), made.finish()]) == text


@pytest.mark.parametrize(("opening", "closing", "label"), SPECIAL)
def test_an_answer_goes_on_in_the_marks_that_the_model_wrote(opening: str, closing: str, label: str) -> None:
    tokenizer, begun = special_thoughts(opening, closing), opening + label
    marks = thought_marks(tokenizer)
    assert marks == ThoughtMarks(opening, closing, label)
    assert resumed("A", "<think>so\n</think>Yes <think>", marks) == f"A{begun}so\n{closing}Yes <think>"
    assert resumed("A", "<think>so", marks) == f"A{begun}so" == resumed(f"A{begun}", "<think>so", marks)
    assert resumed("A", "Yes", marks) == "AYes"
    ids = tokenizer(f"a{begun}", add_special_tokens=False)["input_ids"]
    assert opens_reasoning(tokenizer, ids) and not opens_reasoning(tokenizer, ids[:1])
    assert thought_marks(byte_level()) is None


def test_marks_that_decoding_shows_are_tags_too_and_those_around_an_answer_none_of_it() -> None:
    """Cohere's: North Mini Code writes all of an answer between such tokens, which are no special ones."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    marks = [f"<|{at}_{name}|>" for name in ("THINKING", "TEXT", "RESPONSE") for at in ("START", "END")]
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
    for inside in ("TEXT", "RESPONSE"):
        written = f"so<|END_THINKING|><|START_{inside}|>Yes, <think> é.<|END_{inside}|>"
        made = text_stream(tokenizer, [1])
        ids = tokenizer(f"<|START_THINKING|>{written}", add_special_tokens=False)["input_ids"]
        assert opens_reasoning(tokenizer, ids[:1]) and not opens_reasoning(tokenizer, ids)
        text = "".join([*(made.add([token]) for token in ids), made.finish()])
        assert text == "<think>so</think>Yes, <think> é."
