"""Whether a reasoning model thinks: in the words of its chat template, or the nearest that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import copy_tokenizer

from localmoe.chat.prompt import PromptEncoder
from localmoe.chat.thinking import NO_WAYS, ThinkingWays
from localmoe.core.config import THINKING, GenerationRequest
from localmoe.core.types import Message

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
# in the manner of Qwen3's, DeepSeek-V3.1's, gpt-oss's, Mistral Small 4's, and of one with both
SWITCH = PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
OTHER = PLAIN + "{{ '<think>' if thinking is defined and thinking }}"
WORDS = "{% set e = reasoning_effort | default('medium') %}Reasoning: {{ e }} " + PLAIN
TWO = (
    "{% set e = reasoning_effort | default('none') %}{% if e not in ['none', 'high'] %}"
    "{{ raise_exception('none or high') }}{% endif %}[{{ e }}]" + PLAIN
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}"
    "{{ m.content[0].text }}{% endfor %}" + SWITCH.removeprefix(PLAIN)
)
BOTH = WORDS + "{{ '' if enable_thinking | default(true) else '</think>' }}"


def encoder(template: str | None, folder: Path) -> PromptEncoder:
    copy_tokenizer(folder)
    path = folder / "chat_template.jinja"
    path.unlink() if template is None else path.write_text(template, encoding="utf-8")
    return PromptEncoder(folder)


def prompts(made: PromptEncoder) -> dict[str, str]:
    """What the model is given for each choice."""
    asked: dict[Any, str] = {}
    for thinking in THINKING:
        request = GenerationRequest(messages=(Message("user", "a"),), thinking=thinking)
        asked[thinking] = made.tokenizer.decode(made.encode(request, 4096))
    return asked


@pytest.mark.parametrize(
    ("template", "choices", "told"),
    [
        (None, (), dict.fromkeys(THINKING, "a")),
        (PLAIN, (), dict.fromkeys(THINKING, "a")),
        (SWITCH, ("off", "on"), {**dict.fromkeys(THINKING, "a"), "off": "a<think></think>"}),
        (PARTS, ("off", "on"), {**dict.fromkeys(THINKING, "a"), "off": "a<think></think>"}),
        (OTHER, ("off", "on"), {**dict.fromkeys(THINKING, "a<think>"), "off": "a", "auto": "a"}),
        (WORDS, ("low", "medium", "high"),
         {"auto": "Reasoning: medium a", "off": "Reasoning: low a", "on": "Reasoning: medium a",
          "low": "Reasoning: low a", "medium": "Reasoning: medium a", "high": "Reasoning: high a"}),
        (TWO, ("off", "on", "high"),
         {**dict.fromkeys(THINKING, "[high]a"), "off": "[none]a", "auto": "[none]a"}),
        (BOTH, ("off", "on", "low", "medium", "high"),
         {"auto": "Reasoning: medium a", "off": "Reasoning: medium a</think>", "on": "Reasoning: medium a",
          "low": "Reasoning: low a", "medium": "Reasoning: medium a", "high": "Reasoning: high a"}),
    ],
    ids=["none", "plain", "switch", "parts", "other", "words", "two", "both"],
)  # fmt: skip
def test_what_a_template_lets_one_choose_is_found_and_told(
    template: str | None, choices: tuple[str, ...], told: dict[str, str], tmp_path: Path
) -> None:
    made = encoder(template, tmp_path)
    assert made.thinking.choices == choices
    assert prompts(made) == told
    assert made.has_template == (template is not None)


def test_the_demo_s_template_has_no_choice(tmp_path: Path) -> None:
    copy_tokenizer(tmp_path)
    assert PromptEncoder(tmp_path).thinking == NO_WAYS == ThinkingWays(False, ())
