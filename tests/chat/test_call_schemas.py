"""Whatever a client has for a tool's schema, answers with that tool are held to it, or are free."""

from __future__ import annotations

import json
from typing import Any

import pytest
from held_calls import vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import channels
from test_call_grammar import ASKED, FUNCTIONS, JSON, MISTRAL
from test_call_notations import COHERE, GEMMA, GIGACHAT, GLM, INVOKES, KIMI, LFM, SPELT

from localmoe.chat.call_grammar import calls_grammar
from localmoe.chat.tool_formats import find_format
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool

_NAMES = st.sampled_from(["a", "b", "a b", "$ref", "type", "enum", "", "é", "a.b-c"])
_ANY: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "x", "<", "string", "#/a"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_NAMES, inner, max_size=3)),
    max_leaves=4,
)
_KINDS = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null", "odd"])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(_KINDS, st.lists(_KINDS, max_size=3), _ANY),
            "properties": st.one_of(st.dictionaries(_NAMES, inner, max_size=4), _ANY),
            "required": st.one_of(st.lists(_NAMES, max_size=6), _ANY),
            "additionalProperties": st.one_of(st.booleans(), inner, _ANY),
            "items": st.one_of(inner, _ANY), "const": _ANY,
            "enum": st.one_of(st.lists(_ANY, max_size=3), _ANY),
            "minimum": _ANY, "maximum": _ANY, "multipleOf": _ANY, "minLength": _ANY, "pattern": _ANY,
            "anyOf": st.one_of(st.lists(inner, max_size=2), _ANY), "$defs": _ANY,
            "$ref": st.one_of(st.sampled_from(["#", "#/properties/a", "#/$defs/x", "a:b", "#/"]), _ANY),
        },
    )  # fmt: skip


SCHEMAS = st.recursive(_ANY, _schemas, max_leaves=6)
NOTATIONS = {
    "functions": FUNCTIONS, "json": JSON, "mistral": MISTRAL, "glm": GLM, "spelt": SPELT, "kimi": KIMI,
    "gemma": GEMMA, "lfm": LFM, "minimax": INVOKES, "cohere": COHERE, "gigachat": GIGACHAT,
}  # fmt: skip


@pytest.mark.parametrize("notation", [*NOTATIONS, "harmony"])
@given(parameters=SCHEMAS)
@settings(max_examples=25)
def test_a_schema_of_any_form_is_held_or_refused_in_words(notation: str, parameters: Any) -> None:
    tokenizer = channels() if notation == "harmony" else NOTATIONS[notation]
    asked = ASKED if notation == "harmony" else "hi"
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    tool = Tool("f", json.dumps({"name": "f", "parameters": parameters}))
    try:
        lark = calls_grammar(tokenizer, prompt, [tool], find_format(tokenizer), [tokenizer.eos_token_id or 0])
        if lark is not None:
            made = vocabulary(tokenizer).grammar(lark, len(prompt))
            assert made.allowed(prompt, len(tokenizer)) is not None
    except (ConfigError, RecursionError):
        pass  # what engine.answer_sampling leaves free then
