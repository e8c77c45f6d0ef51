"""From a request to token ids: the template's words, and one clear sentence for what fails."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
from small_tokenizers import DEMO, channels, copy_tokenizer

from localmoe.chat import prompt
from localmoe.chat.prompt import PromptEncoder, TokenEncoder
from localmoe.chat.python_calls import read_python
from localmoe.chat.templates import as_turns, in_own_form
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import CheckpointError, ConfigError, ContextLengthError, LocalMoeError
from localmoe.core.tools import Tool, ToolCall
from localmoe.core.types import Message

CHAT = (
    Message("system", "Be brief."),
    Message("user", "hello"),
    Message("assistant", "Hi!"),
    Message("user", "?"),
)


TOOLS = (Tool("now", '{"name": "now", "description": "Time.", "parameters": {}}'),)
CALLED = (
    Message("user", "when?"), Message("assistant", "", (ToolCall("now", '{"zone": "CET"}', "abc123def"),)),
    Message("tool", "12:00", tool_name="now", tool_call_id="abc123def"),
)  # fmt: skip
# in the manner of Qwen3's, and of DeepSeek's, which joins arguments to other text
OBJECTS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments.zone }}{{ c.id }}</tool_call>{% endfor %}{{ m.name }}{{ m.tool_call_id }}"
    "{% endfor %}"
)
JOINED = OBJECTS.replace("c.function.arguments.zone", "c.function.arguments + ' '")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_before_a_call_are_told_by_the_name_that_the_template_has(name: str, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m." + name + " %}({{ m." + name + " }}){% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    encoder = with_template(tmp_path, template)
    (special, *_) = encoder.tokenizer.all_special_tokens
    first, called, result = CALLED
    thought = Message("assistant", "So.", called.tool_calls, thoughts=f"Hm, {special}")
    ids = encoder.encode(GenerationRequest(messages=(first, thought, result)), 4096)
    assert encoder.tokenizer.decode(ids) == f"[user]when?[assistant](Hm, {special})So.[tool]12:00"
    assert encoder.tokenizer.convert_tokens_to_ids(special) not in ids, "a thought ends no turn"
    plain = encoder.encode(GenerationRequest(messages=CALLED), 4096)
    assert encoder.tokenizer.decode(plain) == "[user]when?[assistant][tool]12:00"


def test_gpt_oss_is_told_thoughts_and_text_before_a_call_in_one() -> None:
    """Its template refuses both, and shows a text there as thoughts."""
    first, called, _ = CALLED
    both = Message("assistant", "I look.", called.tool_calls, thoughts="When?")
    answer = Message("assistant", "Noon.", thoughts="Said.")
    turns = as_turns(in_own_form(channels(), (first, both, answer)), str)
    assert [(turn["content"], turn.get("thinking")) for turn in turns] == [
        ("when?", None), ("", "When?\n\nI look."), ("Noon.", "Said."),
    ]  # fmt: skip


@pytest.mark.parametrize(("template", "shown"), [(OBJECTS, "CET"), (JOINED, '{"zone": "CET"} ')])
def test_tools_and_calls_are_told_as_the_template_wants_them(
    template: str, shown: str, tmp_path: Path
) -> None:
    encoder = with_template(tmp_path, template)
    ids = encoder.encode(GenerationRequest(messages=CALLED, tools=TOOLS), 4096)
    text = encoder.tokenizer.decode(ids)
    offered, _, rest = text.partition("\n")
    assert json.loads(offered) == {"type": "function", "function": json.loads(TOOLS[0].definition)}
    call = f"<tool_call>now {shown}abc123def</tool_call>"
    assert rest == f"[user]when?[assistant]{call}[tool]12:00nowabc123def"
    without = encoder.encode(GenerationRequest(messages=CALLED), 4096)
    assert encoder.tokenizer.decode(without) == rest


def test_calls_that_a_model_tells_apart_by_name_and_count_have_such_ids(tmp_path: Path) -> None:
    """As Kimi's: shown other ids, it writes such itself, and no tool's name."""
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|>{{ c.id }} {% endfor %}"
        "{{ m.tool_call_id }} {% endfor %}"
    )
    encoder = with_template(tmp_path, template)
    twice = (*CALLED, Message("assistant", "", (ToolCall("day", "{}", "b"), ToolCall("now", "{}", "c"))))
    results = Message("tool", "noon", tool_call_id="c"), Message("tool", "Monday", tool_call_id="b")
    ids = encoder.encode(GenerationRequest(messages=(*twice, *results), tools=TOOLS), 4096)
    shown = encoder.tokenizer.decode(ids).replace("<|tool_calls_section_begin|>", "call ")
    assert shown == (
        "nowwhen? call functions.now:0  12:00functions.now:0 call functions.day:1 call functions.now:2  "
        "noonfunctions.now:2 Mondayfunctions.day:1 "
    )
    calls = Message("assistant", "", (ToolCall("day", "{}"), ToolCall("now", "{}")))
    nameless = Message("user", "when?"), calls, Message("tool", "Monday"), Message("tool", "noon")
    ids = encoder.encode(GenerationRequest(messages=(*nameless, Message("user", "so?"))), 4096)
    shown = encoder.tokenizer.decode(ids).replace("<|tool_calls_section_begin|>", "call ")
    assert shown == (
        "when? call functions.day:0 call functions.now:1  Mondayfunctions.day:0 noonfunctions.now:1 so? "
    ), "results without ids are of the calls in turn"


def test_calls_that_a_template_leaves_out_are_shown_as_the_model_wrote_them(tmp_path: Path) -> None:
    """LFM2's: it would read results of calls that it has not made."""
    mark, end = "<|tool_call_start|>", "<|tool_call_end|>"
    template = (
        f"{{# {mark} {end} #}}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
    )
    encoder = with_template(tmp_path, template)
    arguments = {"s": 'it\'s "é"\n', "n": -1.5, "o": {"a": [True, None]}}
    call = ToolCall("day", json.dumps(arguments), "b")
    said = (*CALLED, Message("assistant", "So", (call, ToolCall("now", "{}", "c"))))
    shown = encoder.tokenizer.decode(encoder.encode(GenerationRequest(messages=said), 4096))
    first = f'{mark}[now(zone="CET")]{end}'
    assert shown.startswith(f"[user]when?[assistant]{first}[tool]12:00[assistant]So{mark}[day(")
    written = shown.rpartition(mark)[2].removesuffix(end)
    assert [(one.name, json.loads(one.arguments)) for one in read_python(written)] == [
        ("day", arguments), ("now", {})
    ]  # fmt: skip
    drawn = with_template(tmp_path, template.replace("m.content", "m.tool_calls or m.content"))
    assert mark not in drawn.tokenizer.decode(drawn.encode(GenerationRequest(messages=said), 4096))


@pytest.mark.parametrize(
    "said",
    [
        "{% if not m.content %}{{ raise_exception('Say something.') }}{% endif %}{{ m.content }}",
        "{% if m.content is string %}{{ raise_exception('Use parts.') }}{% endif %}{{ m.content[0].text }}",
    ],
)
def test_tools_are_told_where_a_template_is_particular_about_messages(said: str, tmp_path: Path) -> None:
    told = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    encoder = with_template(tmp_path, f"{told}{{% for m in messages %}}{said}{{% endfor %}}")
    ids = encoder.encode(GenerationRequest(messages=CALLED[:1], tools=TOOLS), 4096)
    assert encoder.tokenizer.decode(ids) == "now when?"


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_tools_for_a_model_that_knows_none_are_refused(template: str | None, tmp_path: Path) -> None:
    encoder = with_template(tmp_path, template)
    for _ in range(2):
        with pytest.raises(ConfigError, match="knows no tools"):
            encoder.encode(GenerationRequest(messages=CALLED[:1], tools=TOOLS), 4096)
    assert encoder.encode(GenerationRequest(messages=CALLED[:1]), 4096)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(DEMO)


def with_template(folder: Path, template: str | None) -> PromptEncoder:
    copy_tokenizer(folder)
    path = folder / "chat_template.jinja"
    if template is None:
        path.unlink()
    else:
        path.write_text(template, encoding="utf-8")
    return PromptEncoder(folder)


def text_of(encoder: PromptEncoder, ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_messages_go_through_the_models_own_template(encoder: PromptEncoder) -> None:
    assert encoder.has_template
    ids = encoder.encode(GenerationRequest(messages=CHAT), 4096)
    assert text_of(encoder, ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    )
    direct = encoder.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT], add_generation_prompt=True, return_dict=False
    )
    assert ids == direct


def test_a_longer_chat_begins_with_the_tokens_of_the_shorter_one(encoder: PromptEncoder) -> None:
    first = encoder.encode(GenerationRequest(messages=CHAT[:2]), 4096)
    assert encoder.encode(GenerationRequest(messages=CHAT), 4096)[: len(first)] == first


def test_a_raw_prompt_is_tokenised_as_it_is(encoder: PromptEncoder) -> None:
    for text in ("Once upon", " leading", "trailing ", "two\n\nlines", "日本語"):
        assert text_of(encoder, encoder.encode(GenerationRequest(prompt=text), 4096)) == text


def test_a_model_without_a_template_gets_a_lone_message_as_it_is_and_a_dialogue_as_lines(
    tmp_path: Path,
) -> None:
    encoder = with_template(tmp_path, None)
    assert not encoder.has_template
    lone = encoder.encode(GenerationRequest(messages=(Message("user", "Once upon"),)), 4096)
    assert text_of(encoder, lone) == "Once upon"
    dialogue = text_of(encoder, encoder.encode(GenerationRequest(messages=CHAT), 4096))
    assert dialogue == "System: Be brief.\nUser: hello\nAssistant: Hi!\nUser: ?\nAssistant:"


PARTS = """{%- for message in messages -%}[{{ message.role }}]
{%- for part in message.content | selectattr("type", "equalto", "text") -%}{{ part.text }}{%- endfor -%}
{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
TEXTS = """{%- for message in messages -%}[{{ message.role }}]{{ message.content }}{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
EITHER = """{%- for message in messages -%}[{{ message.role }}]
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for part in message.content -%}{{ part.text }} as a part{%- endfor -%}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


@pytest.mark.parametrize("template", [PARTS, TEXTS, EITHER])
def test_a_template_gets_what_messages_say_in_the_form_that_it_reads(template: str, tmp_path: Path) -> None:
    encoder = with_template(tmp_path, template)
    text = text_of(encoder, encoder.encode(GenerationRequest(messages=CHAT), 4096))
    assert text == "[system]Be brief.[user]hello[assistant]Hi![user]?[assistant]"


def test_a_template_in_the_older_file_is_read(tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}), encoding="utf-8")
    encoder = PromptEncoder(tmp_path)  # the newer one goes first
    first = encoder.encode(GenerationRequest(messages=CHAT[1:2]), 4096)
    assert text_of(encoder, first).startswith("<|im_start|>user")
    (tmp_path / "chat_template.jinja").unlink()
    encoder = PromptEncoder(tmp_path)
    assert encoder.has_template
    ids = encoder.encode(GenerationRequest(messages=CHAT[1:2]), 4096)
    assert text_of(encoder, ids) == "[user]hello[assistant]"


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, '{"chat_template": 3}', "{}"])
def test_an_older_file_without_a_template_is_said_so(content: str, tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"chat_template\.json") as refusal:
        PromptEncoder(tmp_path)
    assert "\n" not in str(refusal.value)


def edit_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return edit


def start_with(token: str) -> Callable[[Path], None]:
    """Let the tokenizer put a token before every text, as those with a BOS do."""

    def change(content: dict) -> None:  # type: ignore[type-arg]
        number = next(entry["id"] for entry in content["added_tokens"] if entry["content"] == token)
        pieces = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": pieces,
            "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
        }  # fmt: skip

    return edit_json("tokenizer.json", change)


def test_the_beginning_that_a_template_writes_is_not_written_twice(tmp_path: Path) -> None:
    start_with("<|im_start|>")(copy_tokenizer(tmp_path))
    encoder = PromptEncoder(tmp_path)
    raw = text_of(encoder, encoder.encode(GenerationRequest(prompt="hello"), 4096))
    assert raw == "<|im_start|>hello"
    chat = text_of(encoder, encoder.encode(GenerationRequest(messages=CHAT[1:2]), 4096))
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("spare", [-3, 0, 1, 5])
def test_a_prompt_has_to_leave_room_for_at_least_one_token(encoder: PromptEncoder, spare: int) -> None:
    request = GenerationRequest(prompt="one two three four five six seven eight")
    length = len(encoder.encode(request, 10_000))
    if spare > 0:
        assert len(encoder.encode(request, length + spare)) == length
        return
    with pytest.raises(ContextLengthError) as caught:
        encoder.encode(request, length + spare)
    assert f"{length} tokens" in str(caught.value)
    assert f"holds {length + spare}" in str(caught.value)


@pytest.mark.parametrize(("length", "advised"), [(64, 128), (959, 1023), (1000, 1024), (1023, 1024)])
def test_a_context_is_advised_that_the_model_was_made_for(
    encoder: PromptEncoder, length: int, advised: int
) -> None:
    request = GenerationRequest(prompt_token_ids=(5,) * length)
    with pytest.raises(ContextLengthError, match=f"with a context of at least {advised}\\."):
        encoder.encode(request, 64)
    assert len(encoder.encode(request, advised)) == length


class WatchedTokenizer:
    """A tokenizer, and how long the texts were that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.read = tokenizer, list[int]()

    def __call__(self, text: str, **options: bool) -> Any:
        self.read.append(len(text))
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("context", [16, 64, 1024])
def test_of_a_text_that_is_far_too_long_the_beginning_is_tokenised_alone(
    context: int, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "once upon a time there was a \u00e9 " * 100_000
    watched = WatchedTokenizer(encoder.tokenizer)
    monkeypatch.setattr(encoder, "tokenizer", watched)
    for request in (GenerationRequest(prompt=text), GenerationRequest(messages=(Message("user", text),))):
        with pytest.raises(ContextLengthError, match=r"has more than \d+ tokens, but the context holds"):
            encoder.encode(request, context)
    assert len(watched.read) == 2 and max(watched.read) <= 16 * context


def test_a_long_text_of_few_tokens_is_counted_whole(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters tell nothing of a text whose tokens are long."""
    monkeypatch.setattr(prompt, "_LOOKED_AT", 8)
    request = GenerationRequest(prompt=" strawberries" * 40)  # of 13 characters a token
    assert len(encoder.encode(request, 41)) == 40
    with pytest.raises(ContextLengthError, match="has 40 tokens"):
        encoder.encode(request, 40)


def test_what_no_context_of_the_model_holds_can_only_be_shortened(
    encoder: PromptEncoder, tmp_path: Path
) -> None:
    request = GenerationRequest(prompt_token_ids=(5,) * 1024)
    for context in (64, 1024):
        with pytest.raises(ContextLengthError) as caught:
            encoder.encode(request, context)
        assert str(caught.value).endswith(
            "shorten the prompt, as the model was made for at most 1024 tokens."
        )
    copy_tokenizer(tmp_path)
    without = PromptEncoder(tmp_path)
    (tmp_path / "config.json").unlink()
    for unknown in (without, TokenEncoder(64)):
        with pytest.raises(ContextLengthError, match=r"room too: shorten the prompt\.$"):
            unknown.encode(request, 64)


@pytest.mark.parametrize("text", ["a\udcffb", "a\ud800b", "\udfff"])
def test_text_that_is_no_unicode_is_refused(encoder: PromptEncoder, tmp_path: Path, text: str) -> None:
    bare = with_template(tmp_path, None)
    lone, answer = (Message("user", text),), Message("assistant", text)
    for request in (
        GenerationRequest(prompt=text),
        GenerationRequest(messages=lone),
        GenerationRequest(messages=(*CHAT, answer), continue_answer=True),
    ):
        for one in (encoder, bare):
            with pytest.raises(ConfigError, match=r"holds '\\ud...', which is no valid Unicode"):
                one.encode(request, 4096)
    with pytest.raises(ConfigError, match="no valid Unicode"):
        encoder.count(text)


def test_token_ids_are_the_models_whatever_the_tokenizer_knows(encoder: PromptEncoder) -> None:
    """A padded vocabulary has tokens without words, which the model may write; an unpadded one may have
    fewer than a tokenizer to which some were added."""
    words = len(encoder.tokenizer)
    padded, short = PromptEncoder(DEMO, words + 8), PromptEncoder(DEMO, words - 8)
    assert padded.encode(GenerationRequest(prompt_token_ids=(words, words + 7)), 64) == [words, words + 7]
    for no_ids in ((1.5, 2.0), ("a",), (True,), (None,)):
        with pytest.raises(ConfigError, match="outside of 0"):
            encoder.encode(GenerationRequest(prompt_token_ids=no_ids), 64)  # type: ignore[arg-type]
    for one, first in ((encoder, words), (padded, words + 8), (short, words - 8)):
        with pytest.raises(ConfigError, match=f"outside of 0 to {first - 1}, this model's vocabulary"):
            one.encode(GenerationRequest(prompt_token_ids=(1, first)), 64)
    assert padded.tokenizer.decode([words + 7]) == ""


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_it_uses_them() -> None:
    ids = PromptEncoder(DEMO).encode(GenerationRequest(prompt="one two"), 64)
    few = PromptEncoder(DEMO, max(ids))
    with pytest.raises(ConfigError, match=f"token {max(ids)}, .* 0 to {max(ids) - 1}: .* download"):
        few.encode(GenerationRequest(prompt="one two"), 64)


def test_an_empty_prompt_is_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(ConfigError, match="empty"):
        encoder.encode(GenerationRequest(prompt=""), 100)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate.') }}",
        "{% for m in messages %}{{ m['role']",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[99]['content'] }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages | no_such_filter }}",
        "{% include 'other.jinja' %}",
    ],
)
def test_a_template_that_refuses_the_messages_or_is_broken_is_one_sentence(
    tmp_path: Path, template: str
) -> None:
    with pytest.raises(LocalMoeError, match="template"):
        with_template(tmp_path, template).encode(GenerationRequest(messages=CHAT), 4096)


def test_the_reason_that_a_template_gives_reaches_the_user(tmp_path: Path) -> None:
    encoder = with_template(tmp_path, "{{ raise_exception('Conversation roles must alternate.') }}")
    with pytest.raises(ConfigError, match=r"Conversation roles must alternate\."):
        encoder.encode(GenerationRequest(messages=CHAT), 4096)


# in the manner of Mistral's, which counts neither calls nor results
ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('The system begins.') }}{% endif %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{{ m.role[0] }}[{{ m.content }}{{ m.reasoning }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.zone }}){% endfor %}]{% endfor %}"
)
LOOKS = Message("assistant", "b", CALLED[1].tool_calls)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (CHAT, "s[Be brief.]u[hello]a[Hi!]u[?]"),
        ([Message("user", one) for one in "abc"], "u[a\n\nb\n\nc]"),  # as Codex begins
        ([Message("system", "a"), Message("system", "b"), *CALLED], "s[a\n\nb]u[when?]a[(CET)]t[12:00]"),
        ([Message("user", "a"), Message("system", "b"), Message("assistant", "c")], "u[a\n\nb]a[c]"),
        ([*CALLED, Message("user", "Briefly.")], "u[when?]a[(CET)]t[12:00\n\nBriefly.]"),
        ([CHAT[1], Message("assistant", "a", thoughts="x"), LOOKS, CALLED[2], CHAT[2]],
         "u[hello]a[a\n\nbx(CET)]t[12:00]a[Hi!]"),
        ([*CALLED[:2], CALLED[1], CALLED[2], CALLED[2], CHAT[2], CHAT[3]],
         "u[when?]a[(CET)]a[(CET)]t[12:00]t[12:00]a[Hi!]u[?]"),
    ],
)  # fmt: skip
def test_a_template_that_wants_turns_is_told_of_any_conversation_in_turns(
    messages: list[Message], told: str, tmp_path: Path
) -> None:
    request = GenerationRequest(messages=tuple(messages))
    made = with_template(tmp_path, ALTERNATING)
    assert text_of(made, made.encode(request, 4096)) == told


def test_a_template_that_wants_the_system_first_is_told_of_all_else_as_it_is(tmp_path: Path) -> None:
    """As Qwen3.5's, of several messages of the system's, which OpenCode sends, or of later ones."""
    guard = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('First.') }}{% endif %}"
    made = with_template(
        tmp_path, f"{{% for m in messages %}}{guard}{{{{ m.role[0] }}}}[{{{{ m.content }}}}]{{% endfor %}}"
    )
    system = Message("system", "a"), Message("system", "b")
    messages = (*system, CHAT[1], CHAT[3], CALLED[2], Message("system", "c"), CHAT[3])
    ids = made.encode(GenerationRequest(messages=messages), 4096)
    assert text_of(made, ids) == "s[a\n\nb]u[hello]u[?]t[12:00]u[c]u[?]"


@pytest.mark.parametrize("call_id", ["call_7f3aQ", "toolu_01", "", "é", "abc123def"])
def test_a_template_that_wants_short_ids_of_calls_is_told_such(call_id: str, tmp_path: Path) -> None:
    """As Mixtral's, of nine letters and digits; the same as long as the chat goes on."""
    wrong = "{% if i | length != 9 %}{{ raise_exception('Ids have 9.') }}{% endif %}[{{ i }}]"
    made = with_template(
        tmp_path, "{% for m in messages %}{% if m.role == 'tool' %}{% set i = m.tool_call_id %}" + wrong
        + "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set i = c.id %}" + wrong
        + "{% endfor %}{% endif %}{% endfor %}",
    )  # fmt: skip
    call = ToolCall("now", "{}", call_id)
    said = (CHAT[1], CHAT[3], Message("assistant", "", (call,)), Message("tool", "", tool_call_id=call_id))
    told = text_of(made, made.encode(GenerationRequest(messages=said), 4096))
    start, first, second, *_ = told.replace("]", "").split("[")
    assert (start, first, len(first)) == ("hello?", second, 9) and first.isalnum()
    assert first == call_id or call_id != "abc123def"
    longer = text_of(made, made.encode(GenerationRequest(messages=(*said, *said)), 4096))
    assert longer == told * 2


def test_a_template_that_takes_any_conversation_is_told_of_it_as_it_is(tmp_path: Path) -> None:
    made = with_template(tmp_path, "{% for m in messages %}{{ m.role[0] }}[{{ m.content }}]{% endfor %}")
    messages = [Message("user", "a"), Message("user", "b"), Message("system", "c"), CALLED[2], CHAT[3]]
    ids = made.encode(GenerationRequest(messages=tuple(messages)), 4096)
    assert text_of(made, ids) == "u[a]u[b]s[c]t[12:00]u[?]"


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def no_capitals(content: dict[str, Any]) -> None:
    model = content["model"]
    model["vocab"] = {piece: token for piece, token in model["vocab"].items() if "H" not in piece}
    model["merges"] = [pair for pair in model["merges"] if "H" not in "".join(pair)]
    model["unk_token"] = "<unk>"


# what shows with a text, some of it as a panic of the library, which is no Exception
LATENT_DAMAGE: dict[str, Callable[[Path], None]] = {
    "a mark that is gone": edit_json(
        "tokenizer.json",
        lambda content: content["post_processor"].update(
            type="TemplateProcessing", special_tokens={}, pair=[], processors=[],
            single=[{"SpecialToken": {"id": "gone", "type_id": 0}}],
        ),
    ),
    "pieces of no length": edit_json(
        "tokenizer.json", lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0})
    ),
    "letters that are gone": edit_json("tokenizer.json", no_capitals),
}  # fmt: skip


@pytest.mark.parametrize("damage", LATENT_DAMAGE)
def test_damage_that_a_text_brings_to_light_is_one_sentence_too(tmp_path: Path, damage: str) -> None:
    LATENT_DAMAGE[damage](copy_tokenizer(tmp_path))
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be read") as caught:
        PromptEncoder(tmp_path).encode(GenerationRequest(prompt="Hi"), 64)
    assert "\n" not in str(caught.value) and isinstance(caught.value, LocalMoeError)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "empty": write("tokenizer.json", b""),
    "cut off": lambda folder: (
        (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:2000]) and None
    ),
    "not text": write("tokenizer.json", b"\xff\xfe\x00\x01"),
    "a list": write("tokenizer.json", b"[]"),
    "another object": write("tokenizer.json", b'{"version": "1.0"}'),
    "unknown model": edit_json("tokenizer.json", lambda content: content["model"].update(type="Future")),
    "unknown decoder": edit_json(
        "tokenizer.json", lambda content: content.update(decoder={"type": "Future"})
    ),
    "vocabulary of text": edit_json("tokenizer.json", lambda content: content["model"].update(vocab="abc")),
    "merges of unknown tokens": edit_json(
        "tokenizer.json", lambda content: content["model"].update(merges=[["zq\u2603", "\u2603"]])
    ),
    "broken settings": write("tokenizer_config.json", b"{nope"),
    "settings are a list": write("tokenizer_config.json", b"[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tokenizer_is_one_sentence_that_names_the_folder(tmp_path: Path, damage: str) -> None:
    DAMAGE[damage](copy_tokenizer(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        PromptEncoder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused_without_a_look_at_the_network(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read|no tokenizer"):
        PromptEncoder(tmp_path / "nothing" / "here")


FRAMES = {
    "labels": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "brackets": "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    "turns": "{% for m in messages %}{{ '<turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] | trim + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}",
}


@pytest.mark.parametrize("frame", [None, *FRAMES])
@pytest.mark.parametrize("answer", ["Once upon a time", "def f():\n    return", "Grüße, 日本", "a <b> & c."])
def test_a_continued_answer_is_what_transformers_makes_of_it(
    encoder: PromptEncoder, tmp_path: Path, frame: str | None, answer: str
) -> None:
    made = encoder if frame is None else with_template(tmp_path, FRAMES[frame])
    messages = (*CHAT, Message("assistant", answer))
    ids = made.encode(GenerationRequest(messages, continue_answer=True), 4096)
    turns = [{"role": m.role, "content": m.content} for m in messages]
    assert ids == made.tokenizer.apply_chat_template(turns, continue_final_message=True, return_dict=False)
    assert text_of(made, ids).endswith(answer)


def test_thoughts_go_on_after_the_tag_that_the_template_writes(tmp_path: Path) -> None:
    """Where transformers would cut the thoughts out of the answer, as the template does with earlier ones."""
    thinking = FRAMES["labels"].replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    made = with_template(tmp_path, thinking)
    for answer in ("<think>so far", "<think>so far</think>\n\nYes, and"):
        request = GenerationRequest((CHAT[1], Message("assistant", answer)), continue_answer=True)
        told = text_of(made, made.encode(request, 4096))
        assert told.endswith("<|im_start|>assistant\n<think>\n" + answer.removeprefix("<think>"))


def test_an_answer_goes_on_behind_thoughts_that_are_text_whatever_they_say(tmp_path: Path) -> None:
    thinking = FRAMES["labels"].replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    made = with_template(tmp_path, thinking)
    begun = Message("assistant", "Yes, and", thoughts="Is <|im_end|> one?")
    ids = made.encode(GenerationRequest((CHAT[1], begun), continue_answer=True), 4096)
    told = text_of(made, ids)
    assert told.endswith("assistant\n<think>\nIs <|im_end|> one?\n</think>\n\nYes, and")
    assert ids.count(made.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1, "of the question's end"


def test_without_a_template_the_answer_goes_on_after_its_label(tmp_path: Path) -> None:
    made = with_template(tmp_path, None)
    request = GenerationRequest((*CHAT, Message("assistant", " So it")), continue_answer=True)
    assert text_of(made, made.encode(request, 4096)).endswith("User: ?\nAssistant: So it")


@pytest.mark.parametrize("messages", [(), CHAT, CHAT[1:2]])
def test_only_an_answer_can_be_continued(messages: tuple[Message, ...]) -> None:
    with pytest.raises(ConfigError, match="no answer to continue"):
        GenerationRequest(messages, continue_answer=True)


def test_a_text_is_counted_by_itself_and_by_several_threads(encoder: PromptEncoder) -> None:
    texts = ["", "one word", "  two\n\nlines ", "你好", "a very long text " * 2000]
    expected = [len(encoder.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert expected[0] == 0 < expected[1] < expected[-1]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(encoder.count, texts * 5)) == expected * 5


def test_a_model_may_come_with_a_sentencepiece_vocabulary_alone(tmp_path: Path) -> None:
    """As ERNIE 4.5's, whose own class transformers does not have."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "and",
        "then",
        "some",
        "more",
        "words",
        "appear",
        "here",
    ]
    chance = Random(0)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(chance.choices(words, k=12)) for _ in range(400)),
        model_writer=written, vocab_size=60, model_type="bpe", minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = PromptEncoder(tmp_path)
    ids = encoder.encode(GenerationRequest(prompt="the quick dog"), 4096)
    assert len(ids) < len("the quick dog") and text_of(encoder, ids).strip() == "the quick dog"


def test_a_model_may_come_with_a_tiktoken_vocabulary_alone(tmp_path: Path) -> None:
    """As Kimi Linear's, whose own class transformers does not have."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {"260": {"content": "[EOS]", "special": True}},
        "eos_token": "[EOS]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = PromptEncoder(tmp_path)
    ids = encoder.encode(GenerationRequest(prompt="hello wörld"), 4096)
    assert ids[0] == 259 and text_of(encoder, ids) == "hello wörld"
    assert encoder.tokenizer.eos_token_id == 260
