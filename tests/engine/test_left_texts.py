"""Chats in turn, each of which goes on where it was: the tokens of an engine that read it whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import ask, check_stats, load_with_slots
from support.tiny_models import RECURRENT_ARCHITECTURE

from localmoe.core.config import EngineConfig
from localmoe.core.errors import ConfigError

Tiny = Callable[[str], tuple[Path, Any]]
TEXTS = ("a chat about foxes and what they do all day ", "another one, of the sea and of ships that pass ")


@pytest.mark.parametrize(
    "architecture",
    ["mixtral", "deepseek_v2", "gpt_oss", RECURRENT_ARCHITECTURE, "lfm2_moe", "granitemoehybrid",
     "hybrid nemotron_h"],
)  # fmt: skip
def test_answers_are_those_of_an_engine_that_reads_each_text_whole(architecture: str, tiny: Tiny) -> None:
    folder, _ = tiny(architecture)
    chats, reused = [text * 8 for text in TEXTS], []
    with load_with_slots(folder, 10) as engine, load_with_slots(folder, 10, prompt_cache_bytes=0) as other:
        for turn in range(3):
            for index, text in enumerate(chats):
                found = ask(engine, text, 12, draft_length="auto")
                other.reset()
                assert found.tokens == ask(other, text, 12, draft_length=0).tokens, (turn, index)
                check_stats(found)
                reused.append(found.stats.reused_tokens > 100)
                chats[index] = text + found.text + " and then "
    assert reused == [False, False, True, True, True, True]


def test_none_is_kept_where_none_is_wanted_and_a_reset_forgets_all(tiny: Tiny) -> None:
    folder, _ = tiny("mixtral")
    for size, wanted in ((0, False), (None, True), (1 << 20, True), (1000, False)):
        with load_with_slots(folder, 10, prompt_cache_bytes=size) as engine:
            for text in (*TEXTS, TEXTS[0]):
                answer = ask(engine, text * 8, 4)
            assert (answer.stats.reused_tokens > 100) == wanted
            engine.reset()
            assert ask(engine, TEXTS[1] * 8, 4).stats.reused_tokens == 0
    with pytest.raises(ConfigError, match="Prompt cache -1 bytes"):
        EngineConfig(prompt_cache_bytes=-1)
