"""Answers that are JSON of a schema unless they call tools, and nothing beside but thoughts before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from held_calls import TOOLS, accepted, calls_in
from small_tokenizers import channels
from test_call_grammar import ARGUMENTS, ASKED, FUNCTIONS, GOOD, JSON, MISTRAL, THINKING, THOUGHT
from test_call_notations import GEMMA, GLM, KIMI, KIMI_THINKING, OSLO

from localmoe.chat.call_grammar import calls_grammar
from localmoe.core.errors import ConfigError

FORECAST = json.dumps({
    "type": "object", "properties": {"cold": {"type": "boolean"}}, "required": ["cold"],
    "additionalProperties": False,
})  # fmt: skip
COLD = '{"cold": true}'
INVOKED = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def held(tokenizer: Any, text: str, prompt: str = "hi") -> str:
    return accepted(tokenizer, text, prompt, TOOLS, FORECAST)


@pytest.mark.parametrize(
    ("tokenizer", "call", "notation"),
    [
        (JSON, GOOD, "json"), (THINKING, GOOD, "json"), (FUNCTIONS, INVOKED, "functions"),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "mistral"),
        (KIMI, OSLO.join(SECTION), "kimi"), (KIMI_THINKING, OSLO, "kimi"),
        (GEMMA, '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', "gemma"),
        (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
         "arguments"),
    ],
    ids=["json", "thinking", "functions", "mistral", "kimi", "kimi thinking", "gemma", "glm"],
)  # fmt: skip
def test_an_answer_is_json_or_calls(tokenizer: Any, call: str, notation: str) -> None:
    assert held(tokenizer, COLD) == f"{COLD}."
    assert held(tokenizer, call) == f"{call}." and len(calls_in(notation, call)) == 1
    assert held(tokenizer, f"{call}\n{call}") == f"{call}\n{call}."
    for text, taken in (
        ("Sure.", ""), (f"{COLD} indeed", COLD), (f"{COLD}{call}", COLD), (f"{call} indeed", call),
        ('{"cold": 3}', '{"cold": '), ("", ""),
    ):  # fmt: skip
        found = held(tokenizer, text)
        assert found.rstrip() == taken.rstrip() and not found.endswith("."), text


@pytest.mark.parametrize("tokenizer", [THINKING, KIMI_THINKING, GLM], ids=["json", "kimi", "glm"])
def test_thoughts_come_before_either(tokenizer: Any) -> None:
    thoughts = "so {it} may be cold"
    for prompt, opening in (("hi", "<think>"), ("hi<think>", "")):
        assert held(tokenizer, f"{opening}{thoughts}</think>\n\n{COLD}", prompt).endswith("}.")
        assert held(tokenizer, f"{opening}{thoughts}</think>cold", prompt) == f"{opening}{thoughts}</think>"
        assert held(tokenizer, f"{opening}{thoughts}", prompt) == f"{opening}{thoughts}", "it says no more"
    assert held(tokenizer, f"<think>{thoughts}</think><think>") == f"<think>{thoughts}</think>"


def test_a_call_of_kimis_may_end_its_thoughts() -> None:
    assert held(KIMI_THINKING, f"<think>I look{OSLO}{OSLO}") == f"<think>I look{OSLO}{OSLO}."
    assert held(KIMI_THINKING, f"I look{OSLO}", "hi<think>") == f"I look{OSLO}."


def test_of_gpt_oss_the_final_channel_is_json() -> None:
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json{ARGUMENTS}"
    said = "<|channel|>commentary<|message|>i look<|end|><|start|>assistant"
    for ahead in ("", THOUGHT, said, THOUGHT + said):
        for words in ("final", "final <|constrain|>json", "final<|constrain|>json"):
            whole = f"{ahead}<|channel|>{words}<|message|>{COLD}<|return|>"
            assert held(channels(), whole, ASKED) == whole
        assert held(channels(), ahead + call, ASKED) == ahead + call
        begun = f"{ahead}<|channel|>final<|message|>"
        assert held(channels(), f"{begun}it is cold<|return|>", ASKED) == begun
    assert held(channels(), THOUGHT.partition("<|end|>")[0] + "<|return|>", ASKED).count("<|return|>") == 0


def test_a_schema_that_nothing_can_be_held_to_is_refused() -> None:
    with pytest.raises(ConfigError, match="123456789"):
        calls_grammar(JSON, [5], TOOLS, "json", schema='{"type": "number", "multipleOf": 123456789}')
