"""Chats in turn, each of which goes on where it was: the tokens of an engine that read it whole."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.engines import ask, check_stats, load_with_slots, runner_of
from support.tiny_models import RECURRENT_ARCHITECTURE

from localmoe.core.config import EngineConfig
from localmoe.core.errors import ConfigError

Tiny = Callable[[str], tuple[Path, Any]]
TEXTS = ("a chat about foxes and what they do all day ", "another one, of the sea and of ships that pass ")


@pytest.mark.slow(but=2)
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


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("architecture", "where"),
    [("mixtral", "kv_cache.from_host"), (RECURRENT_ARCHITECTURE, "runner.put_together")],
)
def test_a_text_that_cannot_be_brought_back_leaves_nothing_of_another(
    architecture: str, where: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = tiny(architecture)
    chats = [text * 8 for text in TEXTS]
    module, name = f"localmoe.model.{where}".rsplit(".", 1)
    bring = getattr(import_module(module), name)
    with load_with_slots(folder, 10) as engine, load_with_slots(folder, 10, prompt_cache_bytes=0) as other:
        for at in range(1, 4):
            engine.reset()
            written = [text + ask(engine, text, 4).text for text in chats]
            left = [at]

            def fail(*given: Any, left: list[int] = left, **how: Any) -> Any:
                if how:  # keys and values, those of some layers
                    bring(*(list(parts)[: left[0]] for parts in given), **how)
                    left[0] = 1
                left[0] -= 1
                if not left[0]:
                    raise MemoryError("no room")
                return bring(*given)

            with monkeypatch.context() as patch:
                patch.setattr(f"{module}.{name}", fail)
                with pytest.raises(MemoryError):
                    ask(engine, written[0] + " and then", 4)
            for text in reversed(written):
                other.reset()
                assert ask(engine, text, 8).tokens == ask(other, text, 8).tokens


def test_a_copy_of_recurrent_layers_holds_each_tensor_once(tiny: Tiny) -> None:
    folder, _ = tiny(RECURRENT_ARCHITECTURE)
    with load_with_slots(folder, 10) as engine:
        ask(engine, TEXTS[0] * 4, 4)
        kept = runner_of(engine).sequence.copy_out()
        assert all(not vars(like) for like, _ in kept.facts) and kept.num_bytes > 0
