"""Messages with pictures: each stands in the prompt where it stands in what is said, with as many tokens as
it takes, and nothing that is typed is taken for one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import DEMO, byte_level, channels
from tokenizers import AddedToken

from localmoe.chat.image_parts import as_picture_parts, joined, rewritten, with_images
from localmoe.chat.prompt import PromptEncoder, TokenEncoder
from localmoe.chat.said_text import SaidText
from localmoe.chat.templates import in_own_form
from localmoe.chat.turn_taking import tellings
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError, ContextLengthError
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Image, Message

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
# as Qwen3.5's
QWEN = (
    "{%- macro say(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for item in content -%}{%- if item.type == 'image' or 'image' in item or 'image_url' in item -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in item -%}{{ item.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{%- set content = say(m.content) | trim -%}"
    "{%- if m.role == 'system' and m.content is not string -%}"
    "{{ raise_exception('System message cannot contain images.') }}{%- endif -%}"
    "{{ m.role[0] }}[{{ content }}{{ m.reasoning }}"
    "{%- for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}]{%- endfor -%}"
)


class Tokens:
    """Pictures take as many tokens as they have bytes."""

    around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def count(self, image: Image) -> int:
        if image.data == b"bad":
            raise ConfigError("It is no picture that can be read: use another.")
        return len(image.data)


def made(folder: Path, template: str | None = QWEN, *, special: bool = True, reads: bool = True) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    tokens = [AddedToken(name, special=special, normalized=False) for name in (PAD, START, END)]
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    images = Tokens(tokenizer.convert_tokens_to_ids(PAD))
    return PromptEncoder(folder, images=images if reads else None)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return made(tmp_path_factory.mktemp("pictures"))


def pictures(*places: int) -> tuple[Image, ...]:
    """The first takes one token, the second two, ..."""
    return tuple(Image(b"x" * (i + 1), at) for i, at in enumerate(places))


def told(encoder: PromptEncoder, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    ids = encoder.encode(GenerationRequest(messages, tools=tools), 4096)
    text = str(encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return text.replace(START, "(").replace(END, ")").replace(PAD, "#")


def test_a_picture_stands_where_it_stands_in_what_is_said(encoder: Any) -> None:
    assert told(encoder, Message("user", "look", images=pictures(0))) == "u[(#)look]"
    assert told(encoder, Message("user", "look", images=pictures(4))) == "u[look(#)]"
    assert told(encoder, Message("user", "look", images=pictures(2, 2, 3))) == "u[lo(#)(##)o(###)k]"
    assert told(encoder, Message("user", "", images=pictures(0, 0))) == "u[(#)(##)]"


def test_pictures_of_several_messages_are_counted_in_turn(encoder: Any) -> None:
    call = ToolCall("shoot", "{}", "1")
    said = (
        Message("system", "Be brief."), Message("user", "one two", images=pictures(3, 7)),
        Message("assistant", "", (call,)),
        Message("tool", "it is", tool_call_id="1", images=(Image(b"xxxx", 5),)), Message("user", "so?"),
    )  # fmt: skip
    assert told(encoder, *said) == "s[Be brief.]u[one(#) two(##)]a[(shoot)]t[it is(####)]u[so?]"


def test_a_conversation_without_pictures_is_told_as_by_a_model_that_reads_none(
    encoder: Any, tmp_path: Path
) -> None:
    blind = made(tmp_path, reads=False)
    request = GenerationRequest(
        (Message("system", f"a {END}"), Message("user", "b"), Message("assistant", "c"))
    )
    assert encoder.encode(request, 4096) == blind.encode(request, 4096)


@pytest.mark.parametrize("special", [True, False])
def test_the_name_of_a_pictures_place_is_text_whoever_says_it(special: bool, tmp_path: Path) -> None:
    encoder = made(tmp_path, special=special)
    call = ToolCall("f", "{}", PAD)
    said = (
        Message("user", f"a{PAD}b{PAD}", images=pictures(1, 1 + len(PAD))),
        Message("assistant", PAD, (call,), thoughts=PAD), Message("tool", PAD, tool_call_id=PAD),
    )  # fmt: skip
    request = GenerationRequest(said)
    ids = encoder.encode(request, 4096)
    assert ids.count(encoder.tokenizer.convert_tokens_to_ids(PAD)) == 1 + 2
    assert told(encoder, *said) == "u[a(#)#(##)b#]a[##(f)]t[#]"
    begun = GenerationRequest((said[0], Message("assistant", f"so {PAD}")), continue_answer=True)
    ids = encoder.encode(begun, 4096)
    assert ids.count(encoder.tokenizer.convert_tokens_to_ids(PAD)) == 1 + 2


PIECES = (PAD, "<|image_", "pad|>", "<|im_end|>", "<", "|", "a", "é", "\ufdd0", "\n")


@given(st.lists(st.tuples(st.lists(st.sampled_from(PIECES)).map("".join), st.integers(1, 4))), st.text())
def test_marks_leave_pictures_between_the_texts_that_they_stand_between(
    parts: list[tuple[str, int]], rest: str
) -> None:
    images, text = [], ""
    for piece, size in parts:
        text += piece
        images.append(Image(b"x" * size, len(text)))
    message = Message("user", text + rest, images=tuple(images))
    said, mark = SaidText(byte_level(), (PAD,)).marked([message], None)
    (found,) = said.messages
    assert [image.data for image in found.images] == [image.data for image in images]
    cuts = [0, *(image.at for image in found.images), len(found.content)]
    texts = [found.content[begin:end] for begin, end in pairwise(cuts)]
    assert not any(PAD in text for text in texts)
    said_texts = [*(piece for piece, _ in parts), rest]
    assert [text.replace(mark, "") for text in texts] == [text.replace(mark, "") for text in said_texts]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    content = draw(st.text("ab\n", max_size=6))
    places = sorted(draw(st.lists(st.integers(0, len(content)), max_size=3)))
    images = tuple(Image(draw(st.sampled_from([b"x", b"y", b"z"])), at) for at in places)
    return Message(draw(st.sampled_from(["system", "user", "tool"])), content, images=images)


def shown(message: Message) -> str:
    """Each picture as a letter."""
    return "".join(
        part.get("text") or f"<{picture}>" for part, picture in _with_pictures(message)
    )  # fmt: skip


def _with_pictures(message: Message) -> list[tuple[dict[str, str], bytes]]:
    left = iter(message.images)
    return [(part, b"" if part["type"] == "text" else next(left).data) for part in as_picture_parts(message)]


@given(messages(), messages(), st.sampled_from(["", "\n", "\n\n"]))
def test_messages_that_are_joined_keep_their_pictures_in_place(
    one: Message, other: Message, between: str
) -> None:
    content, images = joined(one, other, between)
    line = between if one.content and other.content else ""
    assert shown(Message("user", content, images=images)) == shown(one) + line + shown(other)


@given(st.lists(messages(), min_size=1, max_size=5))
def test_every_way_to_tell_a_conversation_has_all_pictures_in_order(said: list[Message]) -> None:
    wanted = "".join(map(shown, said)).replace("\n", "")
    for telling, _ in tellings(said):
        assert "".join(map(shown, telling)).replace("\n", "") == wanted


@given(messages())
def test_texts_that_are_written_anew_keep_pictures_between_them(message: Message) -> None:
    longer = rewritten(message, lambda text: f"{text}!")
    assert longer.content.count("!") == len(message.images) + 1
    assert shown(longer).replace("!", "") == shown(message)
    assert rewritten(message, str) == message


def test_neighbours_are_told_in_turns_with_their_pictures(tmp_path: Path) -> None:
    guard = (
        "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('Turns!') }}{% endif %}"
    )
    encoder = made(tmp_path, QWEN.replace("{%- set content", guard + "{%- set content"))
    said = Message("user", "a", images=pictures(0)), Message("user", "bc", images=(Image(b"xx", 1),))
    assert told(encoder, *said) == "u[(#)a\n\nb(##)c]"


def test_gpt_oss_gets_what_has_pictures_as_it_is() -> None:
    message = Message("assistant", "a", (ToolCall("f", "{}"),), thoughts="b", images=pictures(1))
    assert in_own_form(channels(), [message]) == [message]


def test_a_model_that_reads_no_pictures_says_so(tmp_path: Path) -> None:
    request = GenerationRequest((Message("user", "a"), Message("tool", "", images=pictures(0))))
    for encoder in (made(tmp_path, reads=False), TokenEncoder(64)):
        with pytest.raises(
            ConfigError, match=r"^This model reads no pictures: ask without them, or load one"
        ):
            encoder.encode(request, 4096)


def test_pictures_without_a_template_are_refused(tmp_path: Path) -> None:
    encoder = made(tmp_path, None)
    with pytest.raises(ConfigError, match=r"no chat template, and pictures need one: ask without them"):
        encoder.encode(GenerationRequest((Message("user", "", images=pictures(0)),)), 4096)
    assert told(encoder, Message("user", "a")) == "a"


@pytest.mark.parametrize(
    ("template", "places"),
    [("{% for m in messages %}{{ m.role }}{% endfor %}", 0),
     (QWEN.replace(PAD, PAD * 2), 2), ("{{ messages[0].content }}", 0)],
)  # fmt: skip
def test_a_template_that_loses_pictures_or_shows_others_is_refused(
    template: str, places: int, tmp_path: Path
) -> None:
    encoder = made(tmp_path, template)
    with pytest.raises(ConfigError, match=rf"other places for pictures \({places}\) than there are \(1\)"):
        encoder.encode(GenerationRequest((Message("user", "a", images=pictures(0)),)), 4096)


def test_what_a_template_refuses_is_said_in_its_words(encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"System message cannot contain images\."):
        told(encoder, Message("system", "a", images=pictures(0)), Message("user", "b"))


def test_an_answer_that_goes_on_has_no_pictures(encoder: Any) -> None:
    begun = Message("assistant", "a", images=pictures(0))
    request = GenerationRequest((Message("user", "a"), begun), continue_answer=True)
    with pytest.raises(ConfigError, match="which no model writes: leave them out"):
        encoder.encode(request, 4096)


def test_a_picture_that_cannot_be_read_is_refused(encoder: Any) -> None:
    with pytest.raises(ConfigError, match="no picture that can be read"):
        told(encoder, Message("user", "a", images=(Image(b"bad"),)))


def test_tokens_of_pictures_count_where_a_prompt_has_to_fit(encoder: Any) -> None:
    request = GenerationRequest((Message("user", "a", images=(Image(b"x" * 100),)),))
    length = len(encoder.encode(request, 4096))
    assert length > 100 and len(encoder.encode(request, length + 1)) == length
    with pytest.raises(ContextLengthError, match=f"The prompt has {length} tokens") as caught:
        encoder.encode(request, length)
    assert caught.value.num_tokens == length


def test_a_raw_prompt_may_name_a_pictures_place(encoder: Any) -> None:
    assert encoder.encode(GenerationRequest(prompt=PAD), 4096) == [
        encoder.tokenizer.convert_tokens_to_ids(PAD)
    ]


def test_a_picture_has_around_it_what_its_model_has_there() -> None:
    """Gemma 4's template writes its place alone."""
    tokens = Tokens(9)
    tokens.around = (7, 8), (6,)
    images = [Image(b"abc"), Image(b"z")]
    assert with_images([1, 9, 2, 9], images, tokens) == [1, 7, 8, 9, 9, 9, 6, 2, 7, 8, 9, 6]
