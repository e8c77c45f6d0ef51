"""What is said in a conversation is text, also where it names control tokens: the model sees their
characters, and the template's own tokens frame every turn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level
from tokenizers import AddedToken

from localmoe.chat.prompt import PromptEncoder
from localmoe.chat.said_text import SaidText, piece_ids
from localmoe.core.config import GenerationRequest
from localmoe.core.tools import ToolCall
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


PIECES = ("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|", " ", "\n", "a", "é", "\ufdd0")


@given(st.lists(st.sampled_from(PIECES)))
def test_whatever_is_typed_none_of_it_is_a_control_token_and_all_of_it_is_there(pieces: list[str]) -> None:
    tokenizer, text = byte_level(), "".join(pieces)
    (message,), _, mark = SaidText(tokenizer).marked([Message("user", text)], "")
    ids = piece_ids(
        message.content, mark, lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"]
    )
    assert not set(ids) & set(tokenizer.added_tokens_decoder)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("name", ["]~b]", "[e~[", "]~!b[", "|eot|", "^-", "{{end}}"])
def test_names_may_begin_with_any_sign(name: str) -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False)], special_tokens=True)
    (message,), _, mark = SaidText(tokenizer).marked([Message("user", f"a{name}{name}b <s>")], "")
    ids = piece_ids(
        message.content, mark, lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"]
    )
    assert tokenizer.convert_tokens_to_ids(name) not in ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f"a{name}{name}b <s>"


def test_a_text_that_has_every_mark_loses_one() -> None:
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    (message,), _, mark = SaidText(byte_level()).marked([Message("user", marks + "<|im_end|>")], "")
    assert message.content.replace(mark, "") == marks.replace(mark, "") + "<|im_end|>"
    assert message.content.count(mark) == 1


def test_tags_of_thoughts_stay_whole_in_what_the_model_wrote_and_switches_in_what_is_typed() -> None:
    class Special:
        special = True

        def __init__(self, content: str) -> None:
            self.content = content

    class Tokenizer:
        chat_template = None
        added_tokens_decoder = dict(enumerate(map(Special, ("<think>", "/nothink", "<eos>"))))  # noqa: RUF012

    said = SaidText(Tokenizer())
    text = "<think>a</think> /nothink <eos>"
    turns, _, mark = said.marked([Message("assistant", text), Message("user", text)], "")
    assert turns[0].content == f"<think>a</think> /nothink <{mark}eos>"
    assert turns[1].content == f"<{mark}think>a</think> /nothink <{mark}eos>"
