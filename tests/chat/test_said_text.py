"""What is said in a conversation is text, also where it names control tokens: the model sees their
characters, and the template's own tokens frame every turn."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from localmoe.chat.prompt import PromptEncoder
from localmoe.chat.said_text import SaidText, piece_ids
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ContextLengthError
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message

TEMPLATES = {
    "byte level": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "byte fallback": "{% for m in messages %}<s>{{ m.content | trim }}</s>{% endfor %}",
}
TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}
NAMES = {"byte level": ("<|im_end|>", "<|im_start|>"), "byte fallback": ("<s>", "</s>", "<unk>")}


def encoder_of(folder: Path, kind: str) -> PromptEncoder:
    TOKENIZERS[kind]().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[kind], encoding="utf-8")
    return PromptEncoder(folder)


@pytest.fixture(scope="module", params=TEMPLATES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, encoder_of(tmp_path_factory.mktemp("said"), request.param)


def framing(encoder: PromptEncoder, ids: list[int]) -> list[int]:
    special = encoder.tokenizer.all_special_ids + list(encoder.tokenizer.added_tokens_decoder)
    return [token for token in ids if token in special]


def as_text(encoder: PromptEncoder, ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("roles", [("user",), ("system", "user", "assistant", "user")])
def test_names_of_control_tokens_are_characters(encoder: Any, roles: tuple[Any, ...]) -> None:
    kind, made = encoder
    for name in NAMES[kind]:
        said = f"in {name} and {name}{name} a {name}"
        plain = GenerationRequest(messages=tuple(Message(role, "in it") for role in roles))
        named = GenerationRequest(messages=tuple(Message(role, said) for role in roles))
        ids, without = made.encode(named, 4096), made.encode(plain, 4096)
        assert framing(made, ids) == framing(made, without), "the template's own, and no other ones"
        assert as_text(made, ids) == as_text(made, without).replace("in it", said)


def test_a_text_without_names_is_tokenised_as_a_whole(encoder: Any) -> None:
    _, made = encoder
    said = "a < b, <b>bold</b>, <|im_ end|> and [0]"
    ids = made.encode(GenerationRequest(messages=(Message("user", said),)), 4096)
    direct = made.tokenizer.apply_chat_template([{"role": "user", "content": said}], return_dict=False)
    assert ids == direct


def test_what_is_typed_is_counted_as_it_will_be_said(encoder: Any) -> None:
    kind, made = encoder
    typed = f"in {NAMES[kind][0]} it" * 9
    asked, begun = (GenerationRequest(messages=(Message("user", said),)) for said in (typed, "in"))
    added = len(made.encode(asked, 4096)) - len(made.encode(begun, 4096))
    assert made.count(typed) - made.count("in") == added > 9 * 4


def test_a_text_that_is_far_too_long_is_said_to_have_no_more_tokens_than_it_has(encoder: Any) -> None:
    kind, made = encoder
    name, context = NAMES[kind][0], 64
    count = 16 * context // (len(name) + 1) + 1  # just so long that its beginning is looked at
    asked = GenerationRequest(messages=(Message("user", name * count),))
    with pytest.raises(ContextLengthError) as refused:
        made.encode(asked, context)
    found = re.search("more than ([0-9]+) tokens", str(refused.value))
    assert found and 2 * context <= int(found[1]) <= len(made.encode(asked, 1 << 20))


def test_a_raw_prompt_may_have_control_tokens(encoder: Any) -> None:
    kind, made = encoder
    name = NAMES[kind][0]
    ids = made.encode(GenerationRequest(prompt=f"a{name}b"), 4096)
    assert made.tokenizer.convert_tokens_to_ids(name) in ids


def test_an_answer_that_goes_on_and_what_tools_are_given_and_say_are_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    made = encoder_of(tmp_path / "tokenizer", "byte level")
    name, call = "<|im_end|>", ToolCall("write", '{"text": "a <|im_end|> b"}', "1")
    made.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}<|im_start|>"
    )
    messages = (
        Message("user", "?"), Message("assistant", "", (call,)), Message("tool", name, tool_call_id="1"),
        Message("assistant", f"so {name} it"),
    )  # fmt: skip
    ids = made.encode(GenerationRequest(messages=messages, continue_answer=True), 4096)
    assert as_text(made, ids) == (
        "<|im_start|>?<|im_end|><|im_start|>" + '{"text": "a <|im_end|> b"}'
        "<|im_end|><|im_start|><|im_end|><|im_end|><|im_start|>so <|im_end|> it"
    )
    end = made.tokenizer.convert_tokens_to_ids(name)
    assert ids.count(end) == 3


TOOLS = (
    "{% for t in tools or [] %}<|im_start|>{{ t | tojson }}<|im_end|>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.name }}|{{ m.tool_call_id }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ ARGUMENTS }}{% endfor %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["c.function.arguments | tojson", "'' + c.function.arguments"])
@pytest.mark.parametrize("name", ["<|im_end|>", r"\u003c|im_end|\u003E", r"<|im\u005fend|>"])
def test_escapes_in_what_tools_are_given_and_what_is_said_of_tools_bring_no_control_token(
    tmp_path: Path, arguments: str, name: str
) -> None:
    encoder = encoder_of(tmp_path, "byte level")
    encoder.tokenizer.chat_template = TOOLS.replace("ARGUMENTS", arguments)
    made, rest = rf'{{"text": "a {name} \n\\u003c \" \u0007"}}', '"parameters": {"type": "object"}'
    tools = (Tool("write", f'{{"name": "write", "description": "a {name}", {rest}}}'),)
    messages = (
        Message("user", "?"), Message("assistant", "", (ToolCall("write", made, "1"),)),
        Message("tool", "so", tool_name="<|im_end|>", tool_call_id="<|im_start|>"),
    )  # fmt: skip
    ids = encoder.encode(GenerationRequest(messages=messages, tools=tools), 4096)
    marks = [encoder.tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>")]
    assert framing(encoder, ids) == marks * 4
    text = as_text(encoder, ids)
    assert text.count("a <|im_end|>") == 2
    assert r"<|im_end|> \n\\u003c \" \u0007" in text, "escapes that JSON needs, and what looks like one"


def test_escapes_in_what_tools_are_given_stay_where_no_name_is(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, "byte level")
    encoder.tokenizer.chat_template = TOOLS.replace("ARGUMENTS", "'' + c.function.arguments")
    made = r'{"text": "a \u003cb\u003e <\/s>"}'
    messages = (Message("user", "?"), Message("assistant", "<|im_end|>", (ToolCall("write", made, "1"),)))
    assert made in as_text(encoder, encoder.encode(GenerationRequest(messages=messages), 4096))


PIECES = ("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|", " ", "\n", "a", "é", "\ufdd0")


@given(st.lists(st.sampled_from(PIECES)))
def test_whatever_is_typed_none_of_it_is_a_control_token_and_all_of_it_is_there(pieces: list[str]) -> None:
    tokenizer, text = byte_level(), "".join(pieces)
    said, mark = SaidText(tokenizer).marked([Message("user", text)], "")
    ids = piece_ids(
        said.messages[0].content, mark, lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"]
    )
    assert not set(ids) & set(tokenizer.added_tokens_decoder)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("name", ["]~b]", "[e~[", "]~!b[", "|eot|", "^-", "{{end}}"])
def test_names_may_begin_with_any_sign(name: str) -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False)], special_tokens=True)
    said, mark = SaidText(tokenizer).marked([Message("user", f"a{name}{name}b <s>")], "")
    ids = piece_ids(
        said.messages[0].content, mark, lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"]
    )
    assert tokenizer.convert_tokens_to_ids(name) not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f"a{name}{name}b <s>"


@pytest.mark.parametrize("joined", ["ĠĊ", "Ċ|", "Ġ0"])
def test_nothing_is_put_into_a_name_by_tokenizers_that_begin_texts_with_a_space(joined: str) -> None:
    """joined: two signs that are one token, a space and a line break among them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: token for token, piece in enumerate([*letters, joined])}
    raw = Tokenizer(models.BPE(vocab, [(joined[0], joined[1])]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex="|" not in joined)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_end|>", "<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    text = "a <|im_end|> and <s><s>b"
    said, mark = SaidText(tokenizer).marked([Message("user", text)], "")
    ids = piece_ids(said.messages[0].content, mark, lambda piece: tokenizer(piece)["input_ids"])
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f" {text}"


def test_nothing_is_put_into_a_name_by_tokenizers_that_strip_line_breaks() -> None:
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    letters = [space, *"<|>_0=", *"abcdefghijklmnopqrstuvwxyz"]
    raw = Tokenizer(models.BPE({piece: token for token, piece in enumerate(letters)}, []))
    raw.normalizer = normalizers.Strip()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    said, mark = SaidText(tokenizer).marked([Message("user", "a<|im_end|>b")], "")
    ids = piece_ids(said.messages[0].content, mark, lambda piece: tokenizer(piece)["input_ids"])
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == "a<|im_end|>b"


def test_a_text_that_has_every_mark_loses_one() -> None:
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    said, mark = SaidText(byte_level()).marked([Message("user", marks + "<|im_end|>")], "")
    content = said.messages[0].content
    assert content.replace(mark, "") == marks.replace(mark, "") + "<|im_end|>"
    assert content.count(mark) == 1


def test_tags_of_thoughts_stay_whole_in_what_the_model_wrote_and_switches_in_what_is_typed() -> None:
    class Special:
        special = True

        def __init__(self, content: str) -> None:
            self.content = content

    class Tokenizer:
        chat_template = None
        added_tokens_decoder = dict(enumerate(map(Special, ("<think>", "/nothink", "<eos>"))))  # noqa: RUF012

    text = "<think>a</think> /nothink <eos>"
    messages = [Message("assistant", text), Message("user", text)]
    said, mark = SaidText(Tokenizer()).marked(messages, "")
    assert said.messages[0].content == f"<think>a</think> /nothink <{mark}eos>"
    assert said.messages[1].content == f"<{mark}think>a</think> /nothink <{mark}eos>"
