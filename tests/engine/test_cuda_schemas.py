"""Answers that are JSON of a schema, by captured passes on a real GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from engine.test_schemas import (
    ASKED,
    SCHEMA,
    TOOLS,
    calling_model,
    check_call,
    is_fox,
    rename_tokens,
    take_tools,
)
from support.engines import Answer, ask, budget_for_slots, check_stats, runner_of
from support.tiny_models import tiny_model, write_model

from localmoe.chat.answer_schema import answer_grammar, schema_rules
from localmoe.chat.token_grammar import Vocabulary
from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.engine import Engine
from localmoe.hub.catalogue import demo_folder

pytestmark = pytest.mark.gpu
LENGTHS = (0, 1, 4, 16, "auto")
# long keys, which the embedded model would cut into other tokens than its tokenizer
CITY = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 16},
            "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
            "days_of_forecast": {"type": "integer", "minimum": 1, "maximum": 14},
            "include_wind_speed": {"type": "boolean"},
        },
        "required": ["city", "temperature_unit", "days_of_forecast", "include_wind_speed"],
        "additionalProperties": False,
    }
)


def model_of(name: str, folder: Path) -> str:
    """Its folder. One that is made up has the embedded model's tokenizer."""
    if name == "demo":
        return str(demo_folder())
    vocab = json.loads((demo_folder() / "config.json").read_text())["vocab_size"]
    changes = {**ANSWERING.get(name, {}), "max_position_embeddings": 2048, "vocab_size": vocab}
    path = write_model(folder / name, tiny_model(name, dtype=torch.bfloat16, **changes))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(demo_folder() / file, path / file)
    return str(path)


def likeliest_allowed(engine: Engine, answer: Answer, schema: str) -> list[int]:
    """Asking the model, and the grammar, before each token."""
    runner, text = runner_of(engine), list(answer.prompt)
    tokenizer, ends = engine._encoder.tokenizer, engine._end_tokens
    grammar = Vocabulary(tokenizer, ends).grammar(
        answer_grammar(tokenizer, text, schema_rules(schema)), len(text)
    )
    engine.reset()
    runner.sequence.truncate(0)
    runner.run(text[:-1], "prefill", last_only=True)
    while len(text) == len(answer.prompt) or text[-1] not in ends:
        scores = runner.run(text[-1:], "verify", last_only=True)[-1].float().cpu()
        allowed = grammar.allowed(text, len(scores))
        assert allowed is not None
        text.append(int(scores.masked_fill(~allowed, -torch.inf).argmax()))
    runner.sequence.truncate(0)
    return text[len(answer.prompt) :]


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("demo", "self"), ("demo", "prompt-lookup"), ("gpt_oss", "self"), ("gpt_oss", "prompt-lookup"),
        ("qwen3_next", "self"),
    ],
)  # fmt: skip
def test_greedy_answers_are_the_likeliest_allowed_tokens_whatever_is_drafted(
    name: str, drafter: str, tmp_path: Path
) -> None:
    """Of a recurrent model too, which cannot go back behind a token."""
    model = model_of(name, tmp_path)
    fixed: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "context": 1024, "strict": True}
    fixed["drafter"] = drafter
    config = EngineConfig(**fixed, vram_budget_bytes=budget_for_slots(model, 12, **fixed))
    with Engine.load(model, config) as engine:
        for schema in (SCHEMA, CITY):
            answers = [ask(engine, ASKED, 200, draft_length=n, json_schema=schema) for n in LENGTHS]
            expected = likeliest_allowed(engine, answers[0], schema)
            for answer in answers:
                assert answer.tokens == expected and answer.finish_reason == "stop"
                assert is_fox(answer.text) if schema == SCHEMA else "include_wind_speed" in answer.text
                check_stats(answer)
        for seed in range(6):
            sampling = SamplingConfig(temperature=1.5, top_k=60, repetition_penalty=1.1, seed=seed)
            how = {"draft_length": LENGTHS[seed % len(LENGTHS)], "sampling": sampling}
            assert is_fox(ask(engine, ASKED, 400, json_schema=SCHEMA, **how).text)


@pytest.mark.parametrize("drafter", ["self", "prompt-lookup"])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.8, seed=3)])
def test_calls_that_need_not_be_are_held_to_their_schemas(
    drafter: str, sampling: SamplingConfig, tmp_path: Path
) -> None:
    model = calling_model(tmp_path / "model")
    fixed: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "context": 1024, "strict": True}
    fixed["drafter"] = drafter
    config = EngineConfig(**fixed, vram_budget_bytes=budget_for_slots(model, 32, **fixed))
    with Engine.load(model, config) as engine:
        answers = [ask(engine, ASKED, 150, draft_length=n, tools=TOOLS, sampling=sampling) for n in LENGTHS]
        for answer in answers:
            check_stats(answer)
            check_call(answer.text)
            assert not sampling.greedy or answer.tokens == answers[0].tokens


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "bailing_hybrid"])
def test_a_call_in_the_middle_of_passes_behind_each_other_is_held(name: str, tmp_path: Path) -> None:
    """Of a recurrent model without drafts, whose passes do not wait for the grammar where all is free."""
    pytest.importorskip(f"transformers.models.{name}")
    model = model_of(name, tmp_path)
    take_tools(Path(model))
    fixed: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "context": 1024, "strict": True}
    config = EngineConfig(**fixed, vram_budget_bytes=budget_for_slots(model, 12, **fixed))
    with Engine.load(model, config) as engine:
        free = ask(engine, ASKED, 60, draft_length=0, tools=TOOLS)
        words = engine._encoder.tokenizer.convert_ids_to_tokens(free.tokens)
    said = {*free.prompt, *free.tokens[:8]}
    at = next(i for i, one in enumerate(free.tokens) if one not in said and len(words[i]) > 2)
    rename_tokens(Path(model), {words[at]: "<tool_call>", "Z": "</tool_call>"})
    with Engine.load(model, config) as engine:
        answers = [ask(engine, ASKED, 200, draft_length=n, tools=TOOLS) for n in (0, *LENGTHS)]
        for answer in answers:
            assert answer.prompt == free.prompt and answer.tokens[: at + 1] == free.tokens[: at + 1]
            assert answer.tokens == answers[0].tokens
            check_call(answer.text)
            check_stats(answer)
