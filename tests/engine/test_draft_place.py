"""The draft is laid aside and taken back between answers, which changes nothing but their speed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_builds import small
from support.engines import ask, budget_for_slots, check_consistent, check_stats, load_with_slots, runner_of
from test_vram_budget import check_within_budget

from localmoe.core.errors import BudgetError, DraftError
from localmoe.core.switches import Switches
from localmoe.engine import Engine, draft_place, draft_upgrade, loading
from localmoe.engine.sources import CheckpointSource
from localmoe.experts.slots import DeviceSlots
from localmoe.hub.catalogue import resolve_model

Tiny = Callable[[str], tuple[Path, Any]]
PROMPT = "Hello there, how are"
SLOTS = 8


@pytest.fixture
def engine(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))  # with a draft of its own
    with load_with_slots(tiny("qwen2_moe")[0], SLOTS) as loaded:
        yield loaded


def believe(engine: Engine, *, drafted: float, plain: float) -> None:
    """Let what was measured be this, in tokens a second."""
    place = engine._draft_place
    if not engine.plan.draft_aside:
        place._know_slots()
    place._worth.drafted_per_s, place._worth.plain_per_s, place._worth.judged = drafted, plain, True


def lay_aside(engine: Engine) -> None:
    believe(engine, drafted=50.0, plain=100.0)
    ask(engine, PROMPT, 2)
    assert engine.plan.draft_aside


def test_experts_get_the_drafts_memory_and_give_it_back(engine: Engine) -> None:
    before, budget = engine.plan, engine.plan.budget_bytes
    tokens = ask(engine, PROMPT, 12).tokens
    believe(engine, drafted=50.0, plain=100.0)
    answer = ask(engine, PROMPT, 12)
    assert answer.tokens == tokens and answer.stats.draft_aside
    assert engine.info().looks_up  # what it drafts meanwhile, it found in the text
    assert engine.plan.draft_aside and engine.plan.drafting and engine.plan.draft_bytes == 0
    assert engine.plan.num_slots > before.num_slots and engine.device_memory()["draft"] == 0
    assert (
        "laid aside" in engine.info().draft and "100 tokens/s without it, 50 with it" in engine.info().draft
    )
    check_within_budget(engine, budget)
    check_stats(answer)
    check_consistent(engine)
    believe(engine, drafted=50.0, plain=40.0)
    answer = ask(engine, PROMPT, 12)
    assert answer.tokens == tokens and engine.plan == before and not answer.stats.draft_aside
    assert not engine.info().looks_up
    assert engine.device_memory()["draft"] == before.draft_bytes
    check_within_budget(engine, budget)
    check_consistent(engine)


def test_the_conversation_goes_on_where_it_was(engine: Engine) -> None:
    first = ask(engine, PROMPT, 6)
    believe(engine, drafted=50.0, plain=100.0)
    prompt = PROMPT + first.text
    again = ask(engine, prompt, 6)
    assert engine.plan.draft_aside and again.stats.reused_tokens > 0


@pytest.mark.parametrize("request_of", [{"draft_length": 3}, {"draft_only": True}])
def test_a_request_for_the_draft_has_it_back_at_once(engine: Engine, request_of: dict[str, Any]) -> None:
    lay_aside(engine)
    answer = ask(engine, PROMPT, 8, **request_of)
    assert answer.stats.drafted > 0 or answer.stats.approximate
    assert not engine.plan.draft_aside and engine.plan.num_slots == SLOTS


def test_it_does_not_leave_again_between_requests_that_ask_for_it(engine: Engine) -> None:
    lay_aside(engine)
    for _ in range(3):
        ask(engine, PROMPT, 4, draft_length=3)
        assert not engine.plan.draft_aside
        ask(engine, PROMPT, 4)
        assert not engine.plan.draft_aside
    believe(engine, drafted=50.0, plain=100.0)  # measured since
    ask(engine, PROMPT, 4)
    assert engine.plan.draft_aside


def test_a_request_without_drafts_leaves_it_where_it_is(engine: Engine) -> None:
    believe(engine, drafted=50.0, plain=100.0)
    ask(engine, PROMPT, 4, draft_length=0)
    assert not engine.plan.draft_aside
    lay_aside(engine)
    believe(engine, drafted=50.0, plain=1.0)
    ask(engine, PROMPT, 4, draft_length=0)
    assert engine.plan.draft_aside


def test_a_fixed_draft_length_keeps_the_draft(tiny: Tiny) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], SLOTS, draft_length=2) as engine:
        believe(engine, drafted=50.0, plain=100.0)
        assert ask(engine, PROMPT, 8).stats.drafted > 0 and not engine.plan.draft_aside


def test_a_reset_brings_it_back(engine: Engine) -> None:
    before = engine.plan
    lay_aside(engine)
    engine.reset()
    assert engine.plan == before and engine._draft_place.rates == ""
    assert ask(engine, PROMPT, 8).stats.drafted > 0


def test_another_budget_is_divided_without_it_and_then_measured_with_it(engine: Engine, tiny: Tiny) -> None:
    lay_aside(engine)
    budget = budget_for_slots(str(tiny("qwen2_moe")[0]), SLOTS + 3)
    plan = engine.resize(budget)
    assert plan.draft_aside and plan.draft_bytes == 0
    check_within_budget(engine, budget)
    ask(engine, PROMPT, 4)
    assert not engine.plan.draft_aside and engine.plan.num_slots == SLOTS + 3
    check_within_budget(engine, budget)


def test_a_budget_that_is_left_to_the_engine_has_room_for_it(engine: Engine) -> None:
    lay_aside(engine)
    plan = engine.resize(None)
    assert plan.draft_aside and plan.resident_share == 1
    ask(engine, PROMPT, 4)
    assert not engine.plan.draft_aside and engine.plan.resident_share == 1


def test_where_there_is_no_room_for_it_any_more_answers_go_on_without(engine: Engine) -> None:
    tokens = ask(engine, PROMPT, 6).tokens
    lay_aside(engine)
    without = engine.plan
    least = without.total_bytes - without.slot_bytes * (without.num_slots - 3)
    engine.resize(least)
    assert ask(engine, PROMPT, 6).tokens == tokens and engine.plan.draft_aside
    with pytest.raises(BudgetError, match=r"too small: .* the low-bit draft"):
        ask(engine, PROMPT, 6, draft_length=2)
    assert ask(engine, PROMPT, 6).tokens == tokens
    check_within_budget(engine, least)
    check_consistent(engine)


def test_a_draft_that_is_gone_is_said_once_and_missed_by_nobody(engine: Engine) -> None:
    tokens = ask(engine, PROMPT, 6).tokens
    lay_aside(engine)
    aside = engine.plan
    assert isinstance(engine.prepared.source, CheckpointSource)
    for folder in resolve_model(str(engine.prepared.source.model.folder)).drafts:
        shutil.rmtree(folder)
    with pytest.raises(DraftError, match="no draft of these weights: load the model"):
        ask(engine, PROMPT, 6, draft_length=2)
    believe(engine, drafted=50.0, plain=1.0)
    assert ask(engine, PROMPT, 6).tokens == tokens and engine.plan == aside
    check_within_budget(engine, aside.budget_bytes)
    check_consistent(engine)


def test_memory_that_runs_out_once_it_is_read_leaves_it_aside(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ask(engine, PROMPT, 6).tokens
    lay_aside(engine)
    aside = engine.plan

    def compact(tensors: object) -> None:
        raise torch.OutOfMemoryError("while it is moved")

    with monkeypatch.context() as patch:
        patch.setattr(draft_place, "compact", compact)
        with pytest.raises(BudgetError, match="taking the draft back"):
            ask(engine, PROMPT, 6, draft_length=2)
    assert engine.plan == aside and engine._loaded.passes.draft is None
    assert ask(engine, PROMPT, 6, draft_length=0).tokens == tokens
    check_consistent(engine)
    assert ask(engine, PROMPT, 6, draft_length=2).tokens == tokens and not engine.plan.draft_aside


def test_a_gpu_that_others_filled_meanwhile_leaves_fewer_slots_and_an_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ask(engine, PROMPT, 6).tokens
    make = DeviceSlots.__init__

    def crowded(self: DeviceSlots, num_slots: int, *rest: Any) -> None:
        if num_slots > 4:
            raise loading.torch.OutOfMemoryError("made to fail")
        make(self, num_slots, *rest)

    monkeypatch.setattr(DeviceSlots, "__init__", crowded)
    believe(engine, drafted=50.0, plain=100.0)
    assert ask(engine, PROMPT, 6).tokens == tokens
    assert engine.plan.draft_aside and engine.plan.num_slots == 4
    monkeypatch.undo()
    engine.reset()
    assert engine.plan.num_slots == SLOTS and ask(engine, PROMPT, 6).tokens == tokens


def test_a_draft_that_comes_back_to_a_crowded_gpu_has_slots_beside_it_within_the_budget(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that others took for a moment, and gave back, is not the draft's and the slots' too."""
    tokens, budget = ask(engine, PROMPT, 6).tokens, engine.plan.budget_bytes
    lay_aside(engine)
    make, tried = DeviceSlots.__init__, []

    def crowded(self: DeviceSlots, num_slots: int, *rest: Any) -> None:
        tried.append(num_slots)
        if len(tried) == 1:
            raise loading.torch.OutOfMemoryError("made to fail")
        make(self, num_slots, *rest)

    monkeypatch.setattr(DeviceSlots, "__init__", crowded)
    with pytest.raises(BudgetError, match="dividing the budget anew"):
        ask(engine, PROMPT, 6, draft_length=2)
    assert tried == [SLOTS, SLOTS] and not engine.plan.draft_aside
    check_within_budget(engine, budget)
    assert ask(engine, PROMPT, 6, draft_length=2).tokens == tokens
    check_consistent(engine)


def test_a_better_draft_that_was_made_meanwhile_is_the_one_that_comes_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_upgrade, "GptqSettings", lambda bits: small(bits=bits).gptq)
    tokens = ask(engine, PROMPT, 6).tokens
    lay_aside(engine)
    assert engine.improve_draft() == "INT4 GPTQ, group 128" and engine.plan.draft_aside
    assert engine.info().draft.startswith("INT4 GPTQ, group 128, laid aside")
    assert ask(engine, PROMPT, 6).tokens == tokens  # with it, since nothing is known of this one
    assert not engine.plan.draft_aside and engine.info().draft == "INT4 GPTQ, group 128"
    assert engine.why_no_better_draft() == "the draft is INT4 GPTQ, group 128"


def test_a_better_draft_is_multiplied_as_the_switches_of_a_request_say(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_upgrade, "GptqSettings", lambda bits: small(bits=bits).gptq)
    off = Switches(fused_draft=False)
    ask(engine, PROMPT, 4, draft_length=2, switches=off)
    engine.improve_draft()
    for switches in (off, Switches(), off):
        ask(engine, PROMPT, 4, draft_length=2, switches=switches)
        layers = runner_of(engine).passes.draft
        assert layers is not None
        fused = {expert.gate_up.fused for layer in layers for expert in layer}
        assert fused == {switches.fused_draft} and engine.info().draft == "INT4 GPTQ, group 128"


def test_a_draft_that_is_read_again_for_other_products_is_said_to_be_what_it_is(
    engine: Engine, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A better one may have been made meanwhile, here by another program."""
    monkeypatch.setattr(draft_upgrade, "GptqSettings", lambda bits: small(bits=bits).gptq)
    with load_with_slots(tiny("qwen2_moe")[0], SLOTS) as other:
        better = other.improve_draft()
    assert engine.info().draft != better
    ask(engine, PROMPT, 4, draft_length=2, switches=Switches(fused_draft=False))
    assert engine.info().draft == better and engine.why_no_better_draft() == f"the draft is {better}"


def test_while_a_better_draft_is_built_it_stays_where_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(engine, drafted=50.0, plain=100.0)
    with engine._improver._running:
        ask(engine, PROMPT, 4)
        assert not engine.plan.draft_aside
    ask(engine, PROMPT, 4)
    assert engine.plan.draft_aside


def test_an_engine_that_is_closed_while_the_draft_is_aside_gives_all_back(engine: Engine) -> None:
    lay_aside(engine)
    parts = engine._loaded
    engine.close()
    assert sum(parts.device_memory().values()) - parts.shared_bytes == 0


def test_it_is_measured_while_it_answers(engine: Engine) -> None:
    for _ in range(4):
        ask(engine, PROMPT, 100)
    worth = engine._draft_place._worth
    assert worth.drafted_per_s is not None and worth.bound_per_s is not None
