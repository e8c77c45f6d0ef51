"""The budget is a promise: what is allocated stays within it, what does not fit is refused before loading."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines import (
    ROOMY,
    ask,
    budget_for_slots,
    check_consistent,
    check_stats,
    load_with_slots,
    memory_of,
)
from support.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURE, tiny_model, write_model

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import BudgetError, EngineBusyError, LocalMoeError
from localmoe.core.units import parse_bytes
from localmoe.engine import Engine, host_parts, plan_model
from localmoe.experts.slots import DeviceSlots

Tiny = Callable[[str], tuple[Path, Any]]
PROMPT = "Hello there, how are"


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[Engine]:
    with load_with_slots(tiny("qwen2_moe")[0], 8) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def bounds(tiny: Tiny) -> tuple[int, int]:
    """Bytes of the smallest budget that holds the draft, and of one that holds more than everything."""
    folder = str(tiny("qwen2_moe")[0])
    return budget_for_slots(folder, 3), budget_for_slots(folder, 26)


def check_within_budget(engine: Engine, budget: int) -> None:
    used, plan = engine.device_memory(), engine.plan
    assert plan.budget_bytes == budget and plan.total_bytes <= budget
    assert sum(used.values()) + plan.workspace_bytes <= budget + 1024, (
        "rotary tables may come on top of the weights"
    )
    assert sum(used.values()) <= budget
    assert used["slots"] == plan.num_slots * plan.slot_bytes
    assert 0 < used["kv"] <= plan.kv_bytes
    assert used["draft"] == plan.draft_bytes
    assert engine.peak_device_bytes() <= budget


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0), draft_length=st.sampled_from([0, 4]))
def test_device_memory_never_exceeds_a_budget_and_the_answer_stays_the_same(
    engine: Engine, bounds: tuple[int, int], share: float, draft_length: int
) -> None:
    budget = int(bounds[0] + share * (bounds[1] - bounds[0]))
    before = ask(engine, PROMPT, 10, draft_length=draft_length)
    plan = engine.resize(budget)
    assert plan == engine.plan and 3 <= plan.num_slots <= 24
    answer = ask(engine, PROMPT, 10, draft_length=draft_length)
    assert answer.tokens == before.tokens
    check_within_budget(engine, budget)
    check_stats(answer)
    check_consistent(engine)
    assert engine.live.resident().sum() <= plan.num_slots
    assert answer.stats.vram_budget_bytes == budget


@pytest.mark.parametrize(
    ("architecture", "draft_length"), [*product(ARCHITECTURES, (0, 4)), (RECURRENT_ARCHITECTURE, 0)]
)
@pytest.mark.slow(but=6)
def test_every_architecture_keeps_the_smallest_budget_that_it_accepts(
    architecture: str, draft_length: int, tiny: Tiny
) -> None:
    folder = str(tiny(architecture)[0])
    config: dict[str, Any] = {"draft_length": draft_length, "context": 64}
    with pytest.raises(BudgetError) as refusal:
        plan_model(folder, EngineConfig(**config, vram_budget_bytes=1000))
    found = re.search(r"a budget of at least (\S+?), or", f"{refusal.value}, or")
    assert found, str(refusal.value)
    budget = parse_bytes(found.group(1).rstrip("."))
    with Engine.load(folder, EngineConfig(**config, vram_budget_bytes=budget)) as engine:
        answer = ask(engine, "ab" * 24, 1000)
        assert len(answer.tokens) == 64 - 48
        assert sum(engine.device_memory().values()) <= budget
        check_stats(answer)


def test_a_budget_that_is_too_small_is_refused_with_numbers_before_any_weight_is_read(tiny: Tiny) -> None:
    reports: list[object] = []
    config = EngineConfig(vram_budget_bytes=2 << 20, draft_length=4)
    with pytest.raises(BudgetError) as refusal:
        Engine.load(str(tiny("qwen2_moe")[0]), config, progress=reports.append)
    assert not reports
    message = str(refusal.value)
    assert "2.0 MiB is too small" in message and "at least" in message and "\n" not in message
    for part in ("shared weights", "KV cache", "low-bit draft", "workspace", "expert slots"):
        assert part in message


def test_a_budget_without_room_for_the_draft_leaves_it_out_with_a_reason(tiny: Tiny) -> None:
    folder = tiny("qwen2_moe")[0]
    budget = budget_for_slots(str(folder), 3, draft_length=0)
    with Engine.load(str(folder), EngineConfig(vram_budget_bytes=budget)) as engine:
        assert not engine.plan.drafting and "draft needs" in engine.plan.drafting_reason
        assert ask(engine, PROMPT).tokens == ask(engine, PROMPT, draft_length=0).tokens
        assert engine.info().draft.startswith("prompt lookup, as there is no draft")
        assert engine.plan.drafting_reason in engine.info().draft
        assert sum(engine.device_memory().values()) <= budget
        assert engine.device_memory()["draft"] == 0


def test_a_resize_that_does_not_fit_is_refused_and_changes_nothing(
    engine: Engine, bounds: tuple[int, int]
) -> None:
    engine.resize(bounds[1])
    # one draft length: the automatic one goes by times, and other windows ask for other experts
    plan, answer = engine.plan, ask(engine, PROMPT, draft_length=4)
    with pytest.raises(BudgetError, match="too small"):
        engine.resize(bounds[0] - 1)
    assert engine.plan == plan and engine.config.vram_budget_bytes == bounds[1]
    again = ask(engine, PROMPT, draft_length=4)
    assert again.tokens == answer.tokens and again.stats.misses == 0, "what was in slots is still there"


@pytest.mark.parametrize("context", [None, 4096])
@pytest.mark.parametrize("draft_length", ["auto", 0, 2])
@pytest.mark.slow(but=3)
def test_a_budget_is_taken_as_it_is_or_by_a_load_or_not_at_all(
    context: int | None, draft_length: Any, tmp_path: Path
) -> None:
    """What nobody asked for, a long context and a draft, a load may leave out."""
    folder = str(write_model(tmp_path / "long", tiny_model("mixtral", max_position_embeddings=32768)))
    config = EngineConfig(device="cpu", draft_length=draft_length, context=context, vram_budget_bytes=1 << 30)
    with Engine.load(folder, config) as engine:
        assert engine.plan.context == context or (context is None and engine.plan.context > 4096)
        assert engine.plan.drafting == (draft_length != 0)
        low, high = 1000, 1 << 30
        while high - low > 1000:  # the least that a resize takes
            middle = (low + high) // 2
            try:
                low, high = (low, middle) if engine.takes_budget(middle) else (middle, high)
            except BudgetError:
                low = middle
        plan = engine.plan
        if context is None or draft_length == "auto":
            assert not engine.takes_budget(high - 2000)
            with Engine.load(folder, replace(config, vram_budget_bytes=high - 2000)) as smaller:
                less = smaller.plan.context < plan.context or smaller.plan.drafting < plan.drafting
                assert less, "a resize would have kept both"
        with pytest.raises(BudgetError):
            engine.resize(high - 2000)
        for fits_nothing in (2000, 20_000):
            with pytest.raises(BudgetError, match="too small"):
                engine.takes_budget(fits_nothing)
        assert engine.plan == plan and engine.config == config
        assert engine.resize(high).num_slots >= 2


def test_memory_that_runs_out_in_a_resize_leaves_as_many_slots_as_before(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may take between plan and allocation what was free."""
    with load_with_slots(tiny("mixtral")[0], 8) as engine:
        before = ask(engine, PROMPT, 10)
        plan, num_slots = engine.plan, engine.plan.num_slots

        made: list[weakref.ref[torch.Tensor]] = []

        class NoMore(DeviceSlots):
            def __init__(self, count: int, *others: Any) -> None:
                assert all(arena() is None for arena in made), "two at once would not fit"
                super().__init__(count, *others)
                made.append(weakref.ref(self._arena))
                if count > num_slots:  # as if for what is made after them
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(host_parts, "DeviceSlots", NoMore)
        with pytest.raises(BudgetError, match="ran out while changing the budget") as refusal:
            engine.resize(None)
        assert refusal.value.budget_bytes and len(made) == 2, "what to try instead"
        assert engine.plan == plan and engine.config.vram_budget_bytes == plan.budget_bytes
        assert engine.device_memory()["slots"] == plan.num_slots * plan.slot_bytes
        after = ask(engine, PROMPT, 10)
        assert after.tokens == before.tokens
        check_consistent(engine)


def test_memory_that_others_take_in_a_resize_leaves_the_slots_that_still_fit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_with_slots(tiny("mixtral")[0], 8) as engine:
        before = ask(engine, PROMPT, 10)
        tried = []

        class Fewer(DeviceSlots):
            def __init__(self, count: int, *others: Any) -> None:
                tried.append(count)
                if count > 5:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                super().__init__(count, *others)

        monkeypatch.setattr(host_parts, "DeviceSlots", Fewer)
        with pytest.raises(BudgetError, match="ran out while changing the budget"):
            engine.resize(None)
        assert tried[1:] == [8, 4] and engine.plan.num_slots == 4
        assert engine.plan.resident_share == 4 / engine.footprint.total_experts
        assert engine.device_memory()["slots"] == 4 * engine.plan.slot_bytes
        assert ask(engine, PROMPT, 10).tokens == before.tokens
        check_consistent(engine)
        monkeypatch.undo()
        assert engine.resize(None).resident_share == 1.0, "once they have given it back"
        assert ask(engine, PROMPT, 10).tokens == before.tokens


def test_where_others_took_even_the_memory_of_the_fewest_slots_each_answer_says_so_until_they_give_it_back(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMemory(DeviceSlots):
        def __init__(self, count: int, *others: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with load_with_slots(tiny("mixtral")[0], 8) as engine:
        before = ask(engine, PROMPT, 10)
        with monkeypatch.context() as taken:
            taken.setattr(host_parts, "DeviceSlots", NoMemory)
            with pytest.raises(BudgetError, match="ran out while changing the budget"):
                engine.resize(None)
            assert engine.device_memory()["slots"] == 0
            for _ in range(2):
                with pytest.raises(BudgetError, match="ran out while making room for experts") as refusal:
                    ask(engine, PROMPT, 10)
                assert refusal.value.budget_bytes
        assert ask(engine, PROMPT, 10).tokens == before.tokens
        check_consistent(engine)


def test_a_resize_that_is_interrupted_leaves_slots_to_be_made_with_the_next_answer(tiny: Tiny) -> None:
    with load_with_slots(tiny("qwen2_moe")[0], 6) as engine:
        expected = ask(engine, PROMPT, 6).tokens
        worker = memory_of(engine)._worker
        join = worker.join

        def interrupted(*args: Any) -> None:
            worker.join = join  # type: ignore[method-assign]
            raise KeyboardInterrupt

        worker.join = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.resize(engine.plan.budget_bytes + 3 * engine.plan.slot_bytes)
        assert ask(engine, PROMPT, 6).tokens == expected
        check_consistent(engine)


def test_without_a_budget_all_experts_of_a_small_model_stay_resident(engine: Engine) -> None:
    plan = engine.resize(None)
    assert plan.num_slots == 24 and plan.resident_share == 1.0
    first, second = (ask(engine, PROMPT, draft_length=4) for _ in range(2))
    assert first.tokens == second.tokens
    assert second.stats.hit_rate == 1.0 and second.stats.h2d_bytes == 0


def test_a_second_answer_and_a_resize_are_refused_while_one_is_written(engine: Engine) -> None:
    stream = engine.stream(GenerationRequest(prompt=PROMPT, max_new_tokens=30))
    next(stream)
    with pytest.raises(EngineBusyError, match="Another answer"):
        ask(engine, "me too")
    with pytest.raises(EngineBusyError, match="stop it"):
        engine.resize(ROOMY)
    with pytest.raises(EngineBusyError, match="stop it"):
        engine.reset()
    next(stream)
    stream.close()
    assert ask(engine, PROMPT, 5).stats.new_tokens == 5


def test_a_request_that_cannot_be_served_leaves_the_engine_free(engine: Engine) -> None:
    before = ask(engine, PROMPT).tokens
    bad: list[dict[str, Any]] = [{"policy": "no-such-policy"}, {"draft_length": -1}, {"draft_length": 65}]
    for request in bad:
        with pytest.raises(LocalMoeError):
            ask(engine, PROMPT, **request)
    with pytest.raises(LocalMoeError, match="600 tokens"):
        ask(engine, "x" * 600)
    assert ask(engine, PROMPT).tokens == before


def test_closing_twice_and_using_a_closed_engine_give_a_clear_error(tiny: Tiny) -> None:
    engine = load_with_slots(tiny("qwen2_moe")[0], 3, draft_length=0)
    worker = memory_of(engine)._worker
    engine.close()
    engine.close()
    assert not worker.is_alive()
    with Engine.load("demo", EngineConfig(device="cpu")) as in_place:
        assert in_place.plan.in_place
    for closed in (engine, in_place):
        uses: list[Callable[[], object]] = [
            closed.device_memory, closed.info, partial(ask, closed, PROMPT), partial(closed.resize, None),
            partial(closed.takes_budget, None),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(LocalMoeError, match="closed"):
                use()
