"""Which tokens a schema allows: by tokenizers of all kinds, behind thoughts in all their marks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level, channels, special_thoughts, thinking_marks

from localmoe.chat.answer_schema import answer_grammar, call_rules, schema_rules
from localmoe.chat.reasoning import split_reasoning
from localmoe.chat.schema_limits import FORMATS
from localmoe.chat.text_stream import text_stream
from localmoe.chat.token_grammar import AnswerGrammar, Vocabulary
from localmoe.chat.tool_formats import FORCED, format_of
from localmoe.chat.tool_stream import ToolStream
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool, ToolCall

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["a", "bb", None, 1.5]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
HALF = '{"name": "x", "age": 1'
WHOLE = '{"name": "x", "age": 12, "likes": ["bb", null]}'


@cache
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer, ends_of(tokenizer))


def ends_of(tokenizer: Any) -> list[int]:
    """As a model's config names them: more than one, where there are."""
    if tokenizer is channels():
        return [ids(tokenizer, mark)[0] for mark in ("<|return|>", "<|call|>")]
    return [tokenizer.eos_token_id]


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def grammar(tokenizer: Any, schema: dict[str, Any] = PERSON, prompt: Sequence[int] = (5, 6)) -> AnswerGrammar:
    lark = answer_grammar(tokenizer, prompt, schema_rules(json.dumps(schema)))
    return vocabulary(tokenizer).grammar(lark, len(prompt))


THINKING = [thinking_marks(special=special) for special in (False, True, None)]


def is_person(value: Any) -> bool:
    return (
        value.keys() == {"name", "age", "likes"}
        and isinstance(value["name"], str) and len(value["name"]) <= 4
        and isinstance(value["age"], int) and 0 <= value["age"] <= 120
        and len(value["likes"]) <= 2 and all(one in ("a", "bb", None, 1.5) for one in value["likes"])
    )  # fmt: skip


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_whatever_is_chosen_among_the_allowed_tokens_is_json_of_the_schema(tokenizer: Any, seed: int) -> None:
    made, text, chance = grammar(tokenizer), [5, 6], random.Random(seed)
    ends = frozenset(ends_of(tokenizer))
    while text[-1] not in ends:
        allowed = made.allowed(text, len(tokenizer) + 3)  # logits may be padded
        assert allowed is not None and allowed.shape == (len(tokenizer) + 3,) and not allowed[-3:].any()
        text.append(chance.choice(allowed.nonzero().flatten().tolist()))
        assert len(text) < 400, "white space has a limit"
    stream = text_stream(tokenizer, text[:2])
    written = "".join([stream.add(text[2:]), stream.finish()])
    assert is_person(json.loads(written)), written
    assert made.allowed(text, 10) is None and made.valid(text[:2], text[2:]) == len(text) - 2


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
@pytest.mark.parametrize("called", [False, True], ids=["schema", "call"])
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_what_is_forced_is_what_every_text_goes_on_with(tokenizer: Any, called: bool, seed: int) -> None:
    """However it is cut into tokens; and it is so where an end is, and behind what is not allowed."""
    rules = call_rules(TOOLS) if called else schema_rules(json.dumps(PERSON))
    made = vocabulary(tokenizer).grammar(answer_grammar(tokenizer, [5, 6], rules), 2)
    text, foretold, chance = [5, 6], list[list[int]](), random.Random(seed)
    ends = frozenset(ends_of(tokenizer))
    while text[-1] not in ends and len(text) < 200:
        forced = made.forced(text)
        assert made.valid(text, forced) == len(forced) and ends.isdisjoint(forced)
        foretold += [[*text[2:], *forced]]
        allowed = made.allowed(text, len(tokenizer))
        assert allowed is not None
        text.append(chance.choice(allowed.nonzero().flatten().tolist()))
    assert made.forced(text) == [] and made.forced([5, 6, ends_of(tokenizer)[0]]) == []
    assert any(len(told) > i for i, told in enumerate(foretold)), "something is forced"
    written = tokenizer.decode(text[2:])
    for told in (tokenizer.decode(tokens).rstrip("\ufffd") for tokens in foretold):  # half a character
        assert written.startswith(told) or told.startswith(written), f"{told} in {written}"


@settings(max_examples=60)
@given(
    places=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=12),
    strange=st.integers(0, 4000),
)
def test_it_says_the_same_wherever_it_was_asked_before(places: list[tuple[int, bool]], strange: int) -> None:
    """Texts that are proposed go back and forth, and may be none that are allowed."""
    tokenizer = byte_level()
    whole, made = [5, 6, *ids(tokenizer, WHOLE), tokenizer.eos_token_id], grammar(byte_level())
    for place, odd in places:
        text = [*whole[: 2 + place], *([strange, *whole[2 + place :]] if odd else [])]
        fresh, said = grammar(byte_level()).allowed(text, 4096), made.allowed(text, 4096)
        assert (said is None) == (fresh is None)
        assert said is None or fresh is None or said.equal(fresh)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
@pytest.mark.parametrize("called", [False, True], ids=["schema", "call"])
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_each_token_is_valid_where_it_is_allowed_and_nowhere_else(
    tokenizer: Any, called: bool, seed: int
) -> None:
    """What a tokenizer would not write in these tokens too, where its tokens alone are allowed."""
    rules = call_rules(TOOLS) if called else schema_rules(json.dumps(PERSON))
    made = vocabulary(tokenizer).grammar(answer_grammar(tokenizer, [5, 6], rules), 2)
    chance, ends, text = random.Random(seed), ends_of(tokenizer), [5, 6]
    while text[-1] not in ends and len(text) < 60:
        allowed = made.allowed(text, len(tokenizer))
        assert allowed is not None
        some = chance.sample(range(len(tokenizer)), min(len(tokenizer), 200))
        for token in {*some, *ends, *allowed.nonzero().flatten().tolist()[:50]}:
            assert made.valid(text, [token]) == int(allowed[token]), tokenizer.decode([*text[2:], token])
        forced = made.forced(text)
        assert not forced or allowed.nonzero().flatten().tolist() == forced[:1]
        text.append(chance.choice(allowed.nonzero().flatten().tolist()))


@settings(max_examples=60)
@given(start=st.integers(0, 12), strange=st.integers(0, 4095), at=st.integers(0, 12))
def test_as_many_tokens_are_valid_as_are_allowed_one_by_one(start: int, strange: int, at: int) -> None:
    tokenizer = byte_level()
    whole = [*ids(tokenizer, WHOLE), tokenizer.eos_token_id, 7]
    text, tokens = [5, 6, *whole[:start]], whole[start:]
    tokens[at : at + 1] = [strange]
    one_by_one, expected = grammar(tokenizer), 0
    while expected < len(tokens):
        allowed = one_by_one.allowed([*text, *tokens[:expected]], 4096)
        if allowed is None or not allowed[tokens[expected]]:
            break
        expected += 1
    assert grammar(tokenizer).valid(text, tokens) == expected


def accepted(tokenizer: Any, prompt: str, text: str, schema: dict[str, Any] = PERSON) -> str:
    """As much of a text, and of the end of the answer, as is allowed."""
    before, tokens = ids(tokenizer, prompt), [*ids(tokenizer, text), ends_of(tokenizer)[0]]
    valid = grammar(tokenizer, schema, before).valid(before, tokens)
    ended = valid == len(tokens)
    return tokenizer.decode(tokens[: valid - ended], skip_special_tokens=False) + "." * ended  # type: ignore[no-any-return]


THOUGHTS = 'So {"name": 3} <b>\n\n1 < 2, "done"\n'


@pytest.mark.parametrize("tokenizer", THINKING, ids=["text", "special", "letters"])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("hi", WHOLE, WHOLE + "."),
        ("hi", f"<think>{THOUGHTS}</think>\n\n{WHOLE}", f"<think>{THOUGHTS}</think>\n\n{WHOLE}."),
        ("hi<think>", f"{THOUGHTS}</think>{WHOLE}", f"{THOUGHTS}</think>{WHOLE}."),
        ("hi<think>\n", "</think>\nNo", "</think>\n"),
        ("hi<think>", THOUGHTS, THOUGHTS),  # thoughts end before the answer does
        ("hi<think></think>", f"{WHOLE}", f"{WHOLE}."),
        ("hi", "Sure", ""), ("hi", f"{HALF}</think>", HALF), ("hi", f"<think></think>{HALF}",
         f"<think></think>{HALF}"), ("hi", f"{WHOLE} ", WHOLE),
    ],
)  # fmt: skip
def test_thoughts_are_free_and_the_answer_is_not(
    tokenizer: Any, prompt: str, text: str, expected: str
) -> None:
    assert accepted(tokenizer, prompt, text) == expected


@pytest.mark.parametrize(("opening", "closing"), [("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>")])
def test_thoughts_are_free_in_marks_of_other_names(opening: str, closing: str) -> None:
    tokenizer = special_thoughts(opening, closing)
    begun = opening if opening == "[THINK]" else f"{opening}thought\n"
    assert accepted(tokenizer, "hi", WHOLE) == WHOLE + "."
    for prompt, text in ("hi", f"{begun}{THOUGHTS}{closing}"), (f"hi{begun}", f"{THOUGHTS}{closing}"):
        assert accepted(tokenizer, prompt, f"{text}\n{WHOLE}") == f"{text}\n{WHOLE}."
        assert accepted(tokenizer, prompt, f"{text}No") == text
        assert accepted(tokenizer, prompt, text.removesuffix(closing)) == text.removesuffix(closing)
    assert accepted(tokenizer, "hi", f"{begun}<think>a</think>b") == f"{begun}<think>a</think"


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
def test_a_model_without_thoughts_begins_with_its_answer(tokenizer: Any) -> None:
    assert accepted(tokenizer, "hi", "<think>") == ""
    for text in ('{"name": "x"', '{"name": "x"'.replace(" ", "\n\t")):
        found = grammar(tokenizer).valid([5, 6], ids(tokenizer, text))
        assert found == len(ids(tokenizer, text))
    assert accepted(tokenizer, "hi", "\n\n\n{") == ""


ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>{}", '<|channel|>final<|message|>{}.'),
        ("<|channel|>final <|constrain|>json<|message|>{}",
         "<|channel|>final <|constrain|>json<|message|>{}."),
        ("<|channel|>analysis<|message|>a {<|end|><|start|>assistant<|channel|>final<|message|>{} ",
         "<|channel|>analysis<|message|>a {<|end|><|start|>assistant<|channel|>final<|message|>{}"),
        ("<|channel|>analysis<|message|>a<|return|>", "<|channel|>analysis<|message|>a"),
        ("<|channel|>analysis<|message|>a</think>", "<|channel|>analysis<|message|>a</think"),
        ("<|channel|>final<|message|>yes", "<|channel|>final<|message|>"),
        ("<|channel|>commentary", "<|channel|>"), ("<|message|>", ""), ("{}", ""),
    ],
)  # fmt: skip
def test_channels_hold_the_answer_in_the_last_one(text: str, expected: str) -> None:
    empty = {"type": "object", "additionalProperties": False}
    assert accepted(channels(), ASKED, text, empty) == expected
    if expected.endswith("."):
        stream = text_stream(channels(), ids(channels(), ASKED))
        shown = "".join([stream.add(ids(channels(), text)), stream.finish()])
        assert json.loads(split_reasoning(shown).answer) == {}


def tool(name: str, **parameters: Any) -> Tool:
    return Tool(name, json.dumps({"name": name, **({"parameters": parameters} if parameters else {})}))


TOOLS = (
    tool("now"),
    tool('odd "name"', properties={"a": {"$ref": "#/$defs/A"}}, required=["a"], additionalProperties=False,
         **{"$defs": {"A": {"type": "integer"}}}),
    tool("move", properties={"a": {"$ref": "#/$defs/A"}}, required=["a"], additionalProperties=False,
         **{"$defs": {"A": {"enum": ["up", "down"]}}}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "now", "arguments": {}}', ("now", {})),
        ('{"name": "now", "arguments": {"any": [1]}}', '{"name": "now", "arguments": {'),
        ('{"name": "odd \\"name\\"", "arguments": {"a": 3}}', None),  # no name of a tool that is read
        ('{"name": "move", "arguments": {"a": "up"}}', ("move", {"a": "up"})),
        ('<think>{"name": "x"}</think>\n{"name": "move", "arguments": {\n  "a": "down"\n}}',
         ("move", {"a": "down"})),
        ('{"name": "move", "arguments": {"a": 3}}', '{"name": "move", "arguments": {"a": '),
        ('{"name": "other"', '{"name": "'), ('[{"name"', ""), ("Sure", ""),
        ('{"name": "now", "arguments": []}', '{"name": "now", "arguments":'),
    ],
)  # fmt: skip
def test_an_answer_that_has_to_be_a_call_is_one_of_a_tool_s_schema(text: str, call: Any) -> None:
    tokenizer, prompt = thinking_marks(special=False), [5, 6]
    made = vocabulary(tokenizer).grammar(answer_grammar(tokenizer, prompt, call_rules(TOOLS)), 2)
    tokens = [*ids(tokenizer, text), tokenizer.eos_token_id]
    valid = made.valid(prompt, tokens)
    if isinstance(call, str):
        assert tokenizer.decode(tokens[:valid]) == call
        return
    assert valid == len(tokens)
    stream = ToolStream(format_of(FORCED), TOOLS)
    answer = split_reasoning(text).answer
    parts = (*stream.add(answer), *stream.finish())
    found = [part for part in parts if isinstance(part, ToolCall)]
    assert [(one.name, json.loads(one.arguments)) for one in found] == ([call] if call else [])


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        (None, "{}", True), (None, '{"a"', False), ({}, '{"a"', False),
        ({"type": "object", "properties": {}}, '{"a"', False),
        ({"type": "object"}, '{"a": [1]}', True),
        ({"type": "object", "additionalProperties": False}, '{"a"', False),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}}, '{"b"', False),
        ({"type": "object", "additionalProperties": True}, '{"b": [1]}', True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"enum": [1]}}}}}, '{"a": 1}', True),
        ({"anyOf": [{"properties": {"a": {"enum": [1]}}, "required": ["a"]}]}, '{"a": 1}', True),
    ],
)  # fmt: skip
def test_arguments_are_those_that_a_tool_names(
    parameters: dict[str, Any] | None, arguments: str, allowed: bool
) -> None:
    named = Tool(
        "f", json.dumps({"name": "f"} if parameters is None else {"name": "f", "parameters": parameters})
    )
    tokenizer, prompt = byte_level(), [5, 6]
    made = vocabulary(tokenizer).grammar(answer_grammar(tokenizer, prompt, call_rules([named])), 2)
    tokens = ids(tokenizer, f'{{"name": "f", "arguments": {arguments}')
    assert (made.valid(prompt, tokens) == len(tokens)) is allowed


@pytest.mark.parametrize("parameters", [[1], "x", 3, {"type": "array"}, {"type": ["object", "null"]}])
def test_parameters_that_are_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(ConfigError, match="parameters of tool 'f' are no schema of an object"):
        call_rules([Tool("f", json.dumps({"name": "f", "parameters": parameters}))])


def test_a_key_is_spelt_in_one_way() -> None:
    """Else a value could escape its schema: there may be others than those that are named."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "\u00e9\n": {"type": "integer"}}}
    for text, allowed in (
        ('{"age": 1, "\\u0061ge": "old"}', False), ('{"\\u00e9\\n": "x"}', False),
        ('{"é\\u000a": "x"}', False),
        ('{"é\\n": "x"}', False), ('{"é\\n": 1, "other": "a\\n\\"b\\\\"}', True),
    ):  # fmt: skip
        tokens = ids(byte_level(), text)
        assert (grammar(byte_level(), schema).valid([5, 6], tokens) == len(tokens)) is allowed, text


def test_thoughts_cannot_spell_their_own_end() -> None:
    tokenizer = thinking_marks(special=False)
    letters = [token for letter in "</think>" for token in ids(tokenizer, letter)]
    before, value = ids(tokenizer, "hi<think>"), ids(tokenizer, "</think>{}")
    made = grammar(tokenizer, {"type": "object"}, before)
    assert made.valid(before, [*ids(tokenizer, "a </thin"), *value]) == len(ids(tokenizer, "a </thin")) + len(
        value
    )
    assert made.valid(before, [*letters, *value]) < len(letters)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf constraints are not"),
        ({"type": "nonsense"}, "Invalid type: nonsense"), ({"$ref": "http://x/y"}, "http://x/y"),
        ({"type": "object", "required": 5}, "required"), ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-around"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength (5)"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_held_to_are_refused_in_one_sentence(
    schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        grammar(byte_level(), schema)
    sentence = str(caught.value)
    assert words in sentence and "\n" not in sentence and sentence.endswith(".") and len(sentence) < 400
    assert not any(inside in sentence for inside in ("start:", "%json", "Parser", "coerce", "<state"))


PATH = {"type": "string", "format": "path", "maxLength": 2}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PATH, '"a/"', '"a/b"'), ({"type": ["string", "null"], "format": "int32"}, "null", "1"),
        ({"enum": ["a"], "format": "x"}, '"a"', '"b"'),
        ({"items": PATH, "type": "array"}, '["a"]', '["abc"]'),
        ({"properties": {"format": PATH}, "type": "object"}, '{"format": "a"}', '{"format": "abc"}'),
        ({"$ref": "#/$defs/format", "$defs": {"format": PATH}}, '"a"', '"abc"'),
        ({"const": {"format": "path"}, "format": "path"}, '{"format": "path"}', "{}"),
        ({"anyOf": [PATH, {"type": "string", "format": "date"}]}, '"2026-02-28"', '"2026-02-30"'),
    ],
)  # fmt: skip
def test_a_format_that_nothing_is_known_of_is_a_note_and_all_else_is_held_to(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    """As JSON Schema has it: pydantic writes "path" and "password", OpenAPI "binary"."""
    made, given = grammar(byte_level(), schema), json.dumps(schema)
    for text, held in ((good, True), (bad, False)):
        tokens = [*ids(byte_level(), text), *ends_of(byte_level())[:1]]
        assert (made.valid([5, 6], tokens) == len(tokens)) is held
    assert json.dumps(schema) == given


@pytest.mark.parametrize("known", sorted(FORMATS))
def test_formats_that_are_known_are_held_to(known: str) -> None:
    tokens = ids(byte_level(), '"%%"')
    assert grammar(byte_level(), {"type": "string", "format": known}).valid([5, 6], tokens) < len(tokens)


@pytest.mark.parametrize("multiple", [123456789, 1000003, 123456.7891, 10**300 + 1, 3e-9 * 7777777])
@pytest.mark.parametrize("within", ["itself", "of a tool", "deep"])
def test_multiples_that_would_take_a_grammar_for_ever_are_refused_at_once(
    multiple: float, within: str
) -> None:
    schema: dict[str, Any] = {"type": "number", "multipleOf": multiple}
    with pytest.raises(ConfigError, match="multipleOf"):
        if within == "of a tool":
            call_rules([tool("f", properties={"a": schema})])
        else:
            grammar(byte_level(), schema if within == "itself" else {"allOf": [{"items": schema}]})


ENDLESS = {"type": "integer", "multipleOf": 19999999}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"default": ENDLESS}}, {"$defs": {"const": ENDLESS}, "$ref": "#/$defs/const"},
        {"default": ENDLESS, "$ref": "#/default"}, {"items": {"$ref": "#/examples/0"}, "examples": [ENDLESS]},
    ],
)  # fmt: skip
def test_such_multiples_are_found_under_names_that_values_have_too(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="multipleOf"):
        schema_rules(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\0b"}, {"enum": ["a", "\x1f"]}, {"properties": {"enum": {"const": {"b": ["\x7f"]}}}},
        {"anyOf": [{"const": "\x01"}, {"const": "a"}]},
    ],
)  # fmt: skip
def test_texts_that_no_grammar_spells_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'\\x[017][0-9a-f]', which is not written: leave it out\.$"):
        grammar(byte_level(), schema)


def test_texts_with_short_escapes_are_written_as_they_are() -> None:
    text, tokenizer = 'a"\\/\b\f\n\r\tb\u2028', byte_level()
    made = grammar(tokenizer, {"const": text, "default": "\0"})
    tokens = [*ids(tokenizer, json.dumps(text, ensure_ascii=False)), tokenizer.eos_token_id]
    assert made.valid([5, 6], tokens) == len(tokens)


def test_multiples_that_no_schema_asks_for_and_round_ones_are_taken() -> None:
    for multiple, text in ((1_000_000, "3000000"), (86400, "172800"), (0.01, "0.12"), (97, "194")):
        schema = {"type": "number", "multipleOf": multiple, "default": {"multipleOf": 123456789}}
        tokens = [*ids(byte_level(), text), byte_level().eos_token_id]
        assert grammar(byte_level(), schema).valid([5, 6], tokens) == len(tokens), text
    with pytest.raises(ConfigError, match="multipleOf"):  # both at once are told apart by their product
        grammar(byte_level(), {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]})


def test_a_schema_that_no_value_satisfies_ends_an_answer_in_one_sentence() -> None:
    made = grammar(byte_level(), {"$ref": "#"})
    with pytest.raises(ConfigError, match=r"schema: it describes no value\.$"):
        for text in ([5, 6], [5, 6, *ids(byte_level(), " ")]):
            made.allowed(text, 4096)


def test_many_properties_may_be_left_out() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"enum": [i]} for i in range(3000)}}
    tokens = ids(byte_level(), '{"p1": 1, "p2999": 2999}')
    assert grammar(byte_level(), schema).valid([5, 6], tokens) == len(tokens)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
def test_end_tokens_that_the_tokenizer_has_not_count_for_nothing(tokenizer: Any) -> None:
    """-1 for none, a row that only pads the model's vocabulary, what no vocabulary is as long as."""
    rules = answer_grammar(tokenizer, [5], schema_rules('{"const": 7}'))
    named = Vocabulary(tokenizer, [-1, *ends_of(tokenizer), len(tokenizer), 2**40]).grammar(rules, 1)
    wanted = vocabulary(tokenizer).grammar(rules, 1)
    for text in ([5], [5, *ids(tokenizer, "7")]):
        found, expected = (one.allowed(text, len(tokenizer) + 8) for one in (named, wanted))
        assert found is not None and expected is not None and found.tolist() == expected.tolist()


def test_models_that_cannot_be_held_to_any_are_refused() -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    raw.decoder = tokenizers.decoders.Fuse()
    odd = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    for tokenizer, ends, words in (
        (byte_level(), [], "names no token that ends an answer"), (object(), [2], "of the kind object"),
        (byte_level(), [-1, 2**40], "names no token that ends an answer"),
        (odd, [0], "of a kind that is not known"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"cannot be held to a schema: .*{words}"):
            Vocabulary(tokenizer, ends).grammar(answer_grammar(byte_level(), [5], schema_rules("{}")), 1)


def test_answers_of_one_grammar_know_nothing_of_each_other_and_compile_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    compile_one = Vocabulary._compiled

    def counted(self: Vocabulary, lark: str, tokens: Any) -> Any:
        compiled.append(lark)
        return compile_one(self, lark, tokens)

    monkeypatch.setattr(Vocabulary, "_compiled", counted)
    made, text = Vocabulary(byte_level(), ends_of(byte_level())), ids(byte_level(), WHOLE)
    rules = [answer_grammar(byte_level(), [5], schema_rules(json.dumps({"const": i}))) for i in range(6)]
    person = answer_grammar(byte_level(), [5, 6], schema_rules(json.dumps(PERSON)))
    first, second = made.grammar(person, 0), made.grammar(person, 2)
    assert first.valid([], text) == len(text) == second.valid([5, 6], text)
    assert first.valid(text[:9], text[9:12]) == 3 and second.valid([5, 6], text[:1]) == 1
    fresh = made.grammar(person, 0)
    assert fresh.valid([], text[3:]) == 0 and fresh.valid([], text) == len(text)
    assert compiled == [person]
    for rule in (*rules[:3], person, rules[3], rules[4]):
        made.grammar(rule, 0)
    assert compiled == [person, *rules[:5]] and list(made._kept) == [rules[2], person, rules[3], rules[4]]
    for _ in range(2):
        with pytest.raises(ConfigError):
            made.grammar("start: nothing_of_that_name", 0)
    assert len(compiled) == 8 and len(made._kept) == 4, "one that cannot be used is not kept"
