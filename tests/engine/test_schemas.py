"""Answers that are JSON of a schema, by the embedded model."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance.hf
import pytest
import torch
import transformers
from support.engines import ask, check_stats, load_with_slots

from localmoe.chat.answer_schema import answer_grammar, schema_rules
from localmoe.chat.token_grammar import Vocabulary
from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.errors import ConfigError
from localmoe.core.tools import Tool
from localmoe.core.types import Message
from localmoe.engine import Engine, answer_sampling, stepping
from localmoe.hub.catalogue import demo_folder
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

ASKED = [Message("user", "Describe a fox.")]
FOX: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "red": {"type": "boolean"},
        "eats": {"type": "array", "items": {"enum": ["mice", "eggs"]}, "maxItems": 2},
    },
    "required": ["name", "age", "red", "eats"], "additionalProperties": False,
}  # fmt: skip
SCHEMA = json.dumps(FOX)


def is_fox(text: str) -> bool:
    fox = json.loads(text)
    return (
        list(fox) == ["name", "age", "red", "eats"]
        and len(fox["name"]) <= 12 and fox["age"] in range(41) and isinstance(fox["red"], bool)
        and len(fox["eats"]) <= 2 and set(fox["eats"]) <= {"mice", "eggs"}
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_with_slots("demo", 32) as loaded:
        yield loaded


def test_greedy_answers_are_the_likeliest_allowed_tokens_whatever_is_drafted(engine: Engine) -> None:
    answers = [ask(engine, ASKED, 120, draft_length=n, json_schema=SCHEMA) for n in (0, 4, "auto")]
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder(), dtype="float32").eval()
    tokenizer, ends = transformers.AutoTokenizer.from_pretrained(demo_folder()), engine._end_tokens
    text = list(answers[0].prompt)
    made = Vocabulary(tokenizer, ends).grammar(
        answer_grammar(tokenizer, text, schema_rules(SCHEMA)), len(text)
    )
    while text[-1] not in ends or len(text) == len(answers[0].prompt):
        with torch.inference_mode():
            scores = model(torch.tensor([text])).logits[0, -1]
        allowed = made.allowed(text, len(scores))
        assert allowed is not None
        text.append(int(scores.masked_fill(~allowed, -torch.inf).argmax()))
    for answer in answers:
        assert answer.tokens == text[len(answer.prompt) :]
        assert is_fox(answer.text) and answer.events[-1].finish_reason == "stop"
        check_stats(answer)


@pytest.mark.slow
def test_what_a_schema_forces_is_drafted_where_no_draft_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with load_with_slots("demo", 32, drafter="prompt-lookup") as engine:
        plain = ask(engine, ASKED, 120, draft_length=0, json_schema=SCHEMA)
        forced = ask(engine, ASKED, 120, draft_length=6, json_schema=SCHEMA)
        with monkeypatch.context() as patch:
            patch.setattr(stepping, "ForcedOrFound", lambda ends, _: PromptLookupDrafter(ends))
            looked_up = ask(engine, ASKED, 120, draft_length=6, json_schema=SCHEMA)
        assert plain.tokens == forced.tokens == looked_up.tokens and is_fox(forced.text)
        assert forced.stats.steps < looked_up.stats.steps < plain.stats.steps
        for answer in (plain, forced):
            check_stats(answer)
        assert ask(engine, ASKED, 20, draft_length=6).tokens == ask(engine, ASKED, 20, draft_length=0).tokens


@pytest.mark.slow
@pytest.mark.parametrize("draft_length", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_sampled_answers_are_json_of_it_too(engine: Engine, draft_length: int, seed: int) -> None:
    sampling = SamplingConfig(temperature=1.5, top_k=60, repetition_penalty=1.1, seed=seed)
    answer = ask(engine, ASKED, 400, draft_length=draft_length, json_schema=SCHEMA, sampling=sampling)
    assert is_fox(answer.text) and answer.events[-1].finish_reason == "stop"


@pytest.mark.slow
def test_one_that_is_cut_is_what_a_longer_one_begins_with_and_a_chat_goes_on(engine: Engine) -> None:
    whole = ask(engine, ASKED, 120, draft_length=3, json_schema=SCHEMA)
    cut = ask(engine, ASKED, 9, draft_length=3, json_schema=SCHEMA)
    assert cut.tokens == whole.tokens[:9] and cut.events[-1].finish_reason == "length"
    chat = [*ASKED, Message("assistant", whole.text), Message("user", "and then?")]
    free = ask(engine, chat, 12, draft_length=3)
    assert free.stats.reused_tokens > 0
    engine.reset()
    assert ask(engine, chat, 12, draft_length=0).tokens == free.tokens


def test_a_tool_that_has_to_be_called_is_called_with_arguments_of_its_schema(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_folder(), tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("{{ tools | tojson if tools }}\n" + template.read_text())
    tools = tuple(Tool(name, json.dumps({"name": name, "parameters": FOX})) for name in ("feed", "see"))
    with load_with_slots(str(folder), 32) as engine:
        for names in (("feed", "see"), ("see",)):
            answer = ask(engine, ASKED, 150, draft_length=3, tools=tools, must_call=names)
            call = json.loads(answer.text)
            assert call["name"] in names and is_fox(json.dumps(call["arguments"]))
            assert answer.events[0].tool_format == "forced"


def test_the_tokenizer_is_looked_at_once_and_ahead_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, looked = llguidance.hf.from_tokenizer, []

    def from_tokenizer(*args: Any, **more: Any) -> Any:
        looked.append(threading.current_thread())
        time.sleep(0.05)  # while another one asks
        return made(*args, **more)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", from_tokenizer)
    with load_with_slots("demo", 32) as engine:
        assert not looked, "few answers have schemas"
        threads = [threading.Thread(target=engine.prepare_grammars) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert ask(engine, ASKED, 3, json_schema=SCHEMA).tokens
        for thread in threads:
            thread.join()
    assert len(looked) == 1 and looked[0] in threads


def test_a_tokenizer_that_grammars_cannot_use_is_told_of_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise ValueError("no such kind")

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", refuse)
    with load_with_slots("demo", 32) as engine:
        engine.prepare_grammars()
        with pytest.raises(ConfigError, match="of a kind that is not known, no such kind"):
            ask(engine, ASKED, 3, json_schema=SCHEMA)


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', '{"type": "string", "pattern": "(?<=a)b"}'])
def test_a_schema_that_cannot_be_held_to_is_refused_and_nothing_is_lost(engine: Engine, schema: str) -> None:
    with pytest.raises(ConfigError, match="No answer can be held to this schema"):
        ask(engine, ASKED, 5, json_schema=schema)
    assert ask(engine, ASKED, 5).tokens


@pytest.mark.parametrize(
    ("schema", "more", "words"),
    [
        ("{", {}, "no JSON"), ("[1]", {}, "JSON object"), ("[" * 100_000, {}, "nested too deep"),
        ("{}", {"draft_only": True}, "approximate"),
        ("{}", {"continue_answer": True}, "continue"),
        ("{}", {"tools": (Tool("a", "{}"),), "must_call": ("a",)}, "a call that has to be"),
        (None, {"tools": (Tool("a", "{}"),), "must_call": ("b",)}, "No tool 'b' is offered"),
        (None, {"must_call": ("b",)}, "No tool 'b' is offered"),
    ],
)  # fmt: skip
def test_what_no_answer_can_be_is_refused_at_once(
    schema: str | None, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        GenerationRequest(messages=(*ASKED, Message("assistant", "{")), json_schema=schema, **more)


def calling_model(folder: Path) -> str:
    """The demo model, which writes marks of calls though it knows none."""
    shutil.copytree(demo_folder(), folder)
    take_tools(folder)
    rename_tokens(folder, {"Ġand": "<tool_call>", "Z": "</tool_call>"})
    return str(folder)


def take_tools(folder: Path) -> None:
    """Let a model's chat template show tools, and calls in JSON."""
    template = folder / "chat_template.jinja"
    template.write_text('{{ tools | tojson if tools }}{# <tool_call>{"arguments" #}\n' + template.read_text())


def rename_tokens(folder: Path, marks: dict[str, str]) -> None:
    """Let tokens of a model's be marks, which it writes where it would have written these."""
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text())
    model = known["model"]
    model["vocab"] = {marks.get(token, token): number for token, number in model["vocab"].items()}
    model["merges"] = [pair for pair in model["merges"] if marks.keys().isdisjoint([*pair, "".join(pair)])]
    usual = {**known["added_tokens"][0], "special": False}
    for mark in marks.values():
        known["added_tokens"].append({**usual, "id": model["vocab"][mark], "content": mark})
    file.write_text(json.dumps(known))


RED = {"properties": {"red": {"type": "boolean"}}, "required": ["red"]}
TOOLS = tuple(Tool(name, json.dumps({"name": name, "parameters": RED})) for name in ("feed", "see"))


def check_call(text: str) -> str:
    """The first call is of a tool, with arguments of its schema; the text before it."""
    before, _, behind = text.partition("<tool_call>")
    call, end, _ = behind.partition("</tool_call>")
    found = json.loads(call)
    assert end and list(found) == ["name", "arguments"] and found["name"] in ("feed", "see")
    assert found["arguments"] in ({"red": True}, {"red": False})
    return before


@pytest.mark.slow
def test_a_call_that_need_not_be_has_arguments_of_its_schema_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_with_slots(calling_model(tmp_path / "model"), 32) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(answer_sampling, "calls_grammar", lambda *given: None)
            free = ask(engine, ASKED, 60, draft_length=0, tools=TOOLS)
        assert "<tool_call>" in free.text and "</tool_call>" not in free.text
        answers = [ask(engine, ASKED, 100, draft_length=n, tools=TOOLS) for n in (0, 4)]
        assert free.text.startswith(check_call(answers[0].text)), "up to its call it is what it was"
        assert answers[1].tokens == answers[0].tokens
        alone = ask(engine, ASKED, 60, draft_length=4, tools=TOOLS, draft_only=True)
        assert "</tool_call>" not in alone.text, "what a draft writes alone is as it writes it"


def test_an_answer_with_a_schema_and_tools_is_json_of_it_or_calls(tmp_path: Path) -> None:
    """The model, which knows neither, draws both where the choice is hot."""
    both: dict[str, Any] = {"tools": TOOLS, "json_schema": SCHEMA}
    with load_with_slots(calling_model(tmp_path / "model"), 32) as engine:
        answers = [ask(engine, ASKED, 120, draft_length=n, **both) for n in (0, 4)]
        assert answers[1].tokens == answers[0].tokens
        called: list[str] = []
        others: list[str] = []
        for seed in range(4, 36):  # the first of them draws soon what was not there before
            for text in (answer.text for answer in answers):
                (called if "<tool_call>" in text else others).append(text)
            if called and others:
                break
            hot = SamplingConfig(temperature=3.0, seed=seed)
            answers = [ask(engine, ASKED, 120, draft_length=4, sampling=hot, **both)]
    assert called and others
    assert not any(check_call(text).strip() for text in called) and all(map(is_fox, others))


def test_where_calls_cannot_be_told_from_json_a_schema_with_tools_is_refused(tmp_path: Path) -> None:
    shutil.copytree(demo_folder(), tmp_path / "model")
    take_tools(tmp_path / "model")  # whose marks are no tokens
    with load_with_slots(str(tmp_path / "model"), 32) as engine:
        with pytest.raises(ConfigError, match="Calls of tools cannot be told from JSON"):
            ask(engine, ASKED, 5, tools=TOOLS, json_schema=SCHEMA)
        assert ask(engine, ASKED, 5, tools=TOOLS).tokens
