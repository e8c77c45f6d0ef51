"""Drafts of other bits in the default place, and memory that runs out while an answer is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import BudgetError, ConfigError
from localmoe.core.stream import StreamEvent
from localmoe.core.types import Message
from localmoe.engine import Engine

REQUEST = GenerationRequest(messages=(Message("user", "Count to ten."),), max_new_tokens=10)


def tokens(events: Iterator[StreamEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_a_draft_of_other_bits_is_built_beside_the_usual_one_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    answers, sizes = [], []
    for bits, draft in ((4, "INT4 GPTQ, group 128"), (8, "INT8 RTN, group 128")):
        with Engine.load("demo", EngineConfig(device="cpu", context=128, draft_bits=bits)) as engine:
            assert engine.info().draft == draft
            answers.append(tokens(engine.stream(REQUEST)))
            sizes.append(engine.plan.draft_bytes)
            assert engine.device_memory()["draft"] <= engine.plan.draft_bytes
            assert (engine.why_no_better_draft() == "") is (bits == 8)  # a GPTQ draft of 8 bits is better
    assert answers[0] == answers[1] and len(answers[0]) == 10
    assert sizes[1] == 2 * sizes[0]  # the CPU keeps 8 bits as two matrices of 4
    assert [path.name for path in tmp_path.glob("drafts/*/*")] == ["int8-rtn-g128"]


def test_bits_that_no_draft_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 bits"):
        EngineConfig(draft_bits=5)
    with pytest.raises(ConfigError, match="of 4 bits"):
        Engine.load_shape("qwen1.5-moe-a2.7b", EngineConfig(draft_bits=2))


def test_memory_that_runs_out_while_answering_names_a_budget_and_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine.load("demo", EngineConfig(device="cpu", context=128, lanes="vram+link")) as engine:
        expected = tokens(engine.stream(REQUEST))

        def run_out(*_: object) -> Iterator[StreamEvent]:
            raise torch.OutOfMemoryError("CUDA out of memory")
            yield

        monkeypatch.setattr(engine, "_answer", run_out)
        with pytest.raises(BudgetError, match="while answering") as caught:
            tokens(engine.stream(REQUEST))
        better = caught.value.budget_bytes
        assert better is not None and 0.8 < better / engine.plan.budget_bytes <= 5 / 6
        monkeypatch.undo()
        engine.resize(better)
        assert tokens(engine.stream(REQUEST)) == expected
