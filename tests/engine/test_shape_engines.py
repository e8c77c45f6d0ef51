"""Engines on random weights: they compute what transformers computes, route and accept as they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import ask, check_consistent, check_stats, memory_of, runner_of
from support.shapes import ask_ids, reference_model, shape_engine, tiny_shape
from support.tiny_models import reference_greedy

from localmoe.core.config import DraftLength, EngineConfig, SamplingConfig
from localmoe.core.errors import BudgetError, ConfigError, ContextLengthError, DraftError
from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.synthetic import RoutingSpec, SyntheticSettings
from localmoe.engine import Engine
from localmoe.model.routing_trace import RoutingRecorder
from localmoe.model.synthetic import SyntheticModel

PROMPT = tuple(range(7, 60, 3))
UNIFORM, STICKY = RoutingSpec("uniform"), RoutingSpec("sticky", repeat=0.6)
DRAFT_LENGTHS: tuple[DraftLength, ...] = (0, 1, 4, 8, "auto")


def simulation(engine: Engine, settings: SyntheticSettings) -> SyntheticModel:
    """The same simulation as the engine's, asked by the test."""
    footprint = engine.footprint
    return SyntheticModel(settings, footprint.num_layers, footprint.num_experts, footprint.experts_per_token)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v2", "gpt_oss", "phimoe", "nemotron_h"])
def test_the_tokens_are_those_of_transformers_with_the_same_weights(architecture: str) -> None:
    with shape_engine(tiny_shape(architecture), 8) as engine:
        expected = reference_greedy(reference_model(engine), list(PROMPT), 12)
        for draft_length in DRAFT_LENGTHS:
            answer = ask_ids(engine, PROMPT, 12, draft_length=draft_length)
            assert answer.tokens == expected, draft_length
            assert answer.text == "" and answer.finish_reason == "length" and answer.prompt == list(PROMPT)
            check_stats(answer)
        check_consistent(engine)


def forced_greedy(
    model: Any, engine: Engine, routing: np.ndarray, prompt: list[int], count: int
) -> list[int]:
    """Greedy tokens of transformers' own model, whose experts are given (T, L, K) in the router's place."""
    for layer, experts in enumerate(engine.prepared.skeleton.experts):
        module = model.get_submodule(experts.path)

        def forward(
            hidden: torch.Tensor,
            index: torch.Tensor,
            weights: torch.Tensor,
            *,
            original: Any = module.forward,
            layer: int = layer,
        ) -> torch.Tensor:
            assert index.shape == (len(hidden), routing.shape[2])
            out: torch.Tensor = original(hidden, torch.from_numpy(routing[: len(hidden), layer]), weights)
            return out

        module.forward = forward
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("number", "architecture"), [*enumerate(["qwen2_moe", "deepseek_v2", "gpt_oss"])])
def test_forced_experts_compute_as_they_would_in_transformers_for_every_setting(
    number: int, architecture: str
) -> None:
    """Every length with every architecture, and with every policy, which sees numbers of experts alone."""
    settings = SyntheticSettings(STICKY, match=0.6, seed=4)
    with shape_engine(tiny_shape(architecture), 8, settings) as engine:
        routing = simulation(engine, settings).target_window(0, 64)
        expected = forced_greedy(reference_model(engine), engine, routing, list(PROMPT), 12)
        plain = shape_engine(tiny_shape(architecture), 8, SyntheticSettings(seed=4))
        with plain:
            assert ask_ids(plain, PROMPT, 12).tokens != expected, "the routing has to matter"
        for place, draft_length in enumerate(DRAFT_LENGTHS):
            policy = ("on-demand", "moe-speq")[(number + place) % 2]
            engine.reset()
            answer = ask_ids(engine, PROMPT, 12, draft_length=draft_length, policy=policy)
            assert answer.tokens == expected, (policy, draft_length)
            check_stats(answer)
        check_consistent(engine)


def test_answers_after_the_first_are_routed_differently_and_a_reset_starts_over() -> None:
    settings = SyntheticSettings(UNIFORM, match=1.0)
    with shape_engine(tiny_shape("qwen2_moe"), 24, settings) as engine:
        recorded = []
        for _ in range(2):
            engine.reset()
            for _ in range(2):
                recorder = RoutingRecorder(3)
                engine.record_routing(recorder)
                recorder.begin()
                engine._session.text.forget()
                ask_ids(engine, PROMPT, 8, draft_length=0)
                recorded.append(recorder.trace("", 8).experts)
        expected = simulation(engine, settings)
        assert (recorded[0] == expected.target_window(0, len(PROMPT) + 7)).all()
        assert (recorded[0] == recorded[2]).all() and (recorded[1] == recorded[3]).all()
        assert (recorded[0] != recorded[1]).any()


@pytest.mark.parametrize("match", [0.0, 0.7, 1.0])
@pytest.mark.slow(but=1)
def test_the_match_rate_is_the_simulated_one(match: float) -> None:
    settings = SyntheticSettings(STICKY, acceptance=0.8, match=match)
    with shape_engine(tiny_shape("qwen2_moe"), 8, settings) as engine:
        stats = ask_ids(engine, PROMPT, 120, draft_length=4).stats
        assert stats.expert_match_rate == pytest.approx(match, abs=0.1 if match % 1 else 0)


@pytest.mark.parametrize(("acceptance", "temperature"), [(0.0, 0), (0.6, 0), (0.6, 0.9), (1.0, 0)])
@pytest.mark.slow(but=2)
def test_drafted_tokens_are_accepted_as_simulated(acceptance: float, temperature: float) -> None:
    settings = SyntheticSettings(acceptance=acceptance)
    sampling = SamplingConfig(temperature=temperature, seed=1)
    with shape_engine(tiny_shape("qwen2_moe"), 8, settings) as engine:
        answer = ask_ids(engine, PROMPT, 61, draft_length=3, sampling=sampling)
        check_stats(answer)
        assert len(answer.tokens) == 61
        expected = simulation(engine, settings)
        position = len(PROMPT) + 1  # of the first drafted token
        for event in answer.events[1:-1]:
            accepted = 0
            while accepted < 3 and expected.accepts(position + accepted):
                accepted += 1
            assert (event.drafted, len(event.token_ids)) == (accepted, accepted + 1)
            position += accepted + 1
        rate = answer.stats.acceptance_rate
        assert rate is not None and (acceptance % 1 or rate == acceptance)
        check_consistent(engine)


def test_emitted_tokens_are_the_drafted_ones_and_the_targets_choice_after_them() -> None:
    settings = SyntheticSettings(acceptance=0.5)
    with shape_engine(tiny_shape("olmoe"), 8, settings) as engine:
        model = reference_model(engine)
        answer = ask_ids(engine, PROMPT, 30, draft_length=3)
        held, drafted = list(PROMPT), 0
        for event in answer.events:
            *kept, own = event.token_ids
            assert len(kept) == event.drafted
            held += kept
            assert reference_greedy(model, held, 1) == [own]
            held.append(own)
            drafted += event.drafted
        assert drafted > 3


def test_a_recorded_trace_can_be_replayed_on_random_weights(tmp_path: Path) -> None:
    source = SyntheticSettings(STICKY)
    with shape_engine(tiny_shape("qwen3_moe"), 24, source) as engine:
        recorder = RoutingRecorder(3)
        engine.record_routing(recorder)
        recorder.begin()
        ask_ids(engine, PROMPT, 10, draft_length=0)
        engine.record_routing(None)
        ask_ids(engine, PROMPT, 10, draft_length=0)
        trace = recorder.trace("tiny", 8)
    assert len(trace.experts) == len(PROMPT) + 9, "the last token is never read"
    trace.write(tmp_path / "trace.npz")
    replay = SyntheticSettings(RoutingSpec("trace", path=tmp_path / "trace.npz"), match=1.0)
    with shape_engine(tiny_shape("qwen3_moe"), 24, replay) as engine:
        again = RoutingRecorder(3)
        engine.record_routing(again)
        again.begin()
        ask_ids(engine, PROMPT, 10, draft_length=0)
        assert (again.trace("", 8).experts == trace.experts).all()
    with pytest.raises(ConfigError, match="3 MoE layers of 8 experts"):
        shape_engine(tiny_shape("qwen3_moe", num_experts=4), 4, replay)


def test_padding_rows_and_drafts_are_not_recorded() -> None:
    with shape_engine(tiny_shape("qwen2_moe"), 24) as engine:
        assert runner_of(engine).passes.rows.multiple > 1, "otherwise nothing is padded"
        recorder = RoutingRecorder(3)
        engine.record_routing(recorder)
        recorder.begin()
        answer = ask_ids(engine, PROMPT, 10, draft_length=2)
        stats = answer.stats
        verified = stats.drafted + stats.steps  # rejected tokens are told of too
        assert recorder.num_tokens == len(PROMPT) + verified


def test_a_shape_is_planned_described_resized_and_closed_like_a_model() -> None:
    with shape_engine(tiny_shape("mixtral"), 8) as engine:
        info = engine.info()
        assert info.name == "tiny mixtral (synthetic weights)" == engine.footprint.name
        assert "synthetic" in info.draft and not info.has_chat_template
        assert engine.device_memory()["draft"] > 0
        before = ask_ids(engine, PROMPT, 10, draft_length=2).tokens
        plan = engine.resize(engine.plan.total_bytes - 3 * engine.plan.slot_bytes)
        assert plan.num_slots == 5 == memory_of(engine).slots.num_slots
        assert ask_ids(engine, PROMPT, 10, draft_length=2).tokens == before
    with pytest.raises(BudgetError, match="too small"):
        Engine.load_shape(tiny_shape("mixtral"), EngineConfig(device="cpu", vram_budget_bytes=1 << 20))


def test_requests_that_a_shape_cannot_serve_are_refused_and_leave_it_usable() -> None:
    with shape_engine(tiny_shape("olmoe"), 8, context=64, draft_length=0) as engine:
        with pytest.raises(ConfigError, match="token ids"):
            ask(engine, "some text")
        for ids in ((), (5, 256), (-1, 4)):
            with pytest.raises(ConfigError, match=r"empty|vocabulary"):
                ask_ids(engine, ids)
        with pytest.raises(ContextLengthError, match="64"):
            ask_ids(engine, (1,) * 64)
        with pytest.raises(DraftError):
            ask_ids(engine, PROMPT, draft_length=2)
        assert len(ask_ids(engine, (1,) * 60, 100).tokens) == 4


def test_settings_that_make_no_sense_are_refused_before_weights_are_made(tmp_path: Path) -> None:
    reports: list[object] = []
    config = EngineConfig(device="cpu")
    wrong: list[tuple[Any, EngineConfig, SyntheticSettings | None]] = [
        ("no-such-shape", config, None),
        (tiny_shape("olmoe"), EngineConfig(device="cpu", draft_dir=tmp_path), None),
        (tiny_shape("olmoe"), EngineConfig(device="cpu", policy="magic"), None),
        (tiny_shape("olmoe"), config, SyntheticSettings(RoutingSpec("trace", path=tmp_path / "absent"))),
    ]
    for shape, settings, synthetic in wrong:
        with pytest.raises(ConfigError):
            Engine.load_shape(shape, settings, synthetic, progress=reports.append)
    assert not reports


def test_a_model_with_words_takes_token_ids_too() -> None:
    with Engine.load("demo", EngineConfig(device="cpu", draft_length=0)) as engine:
        written = ask(engine, "Once upon a time", 8)
        assert ask_ids(engine, tuple(written.prompt), 8).tokens == written.tokens
        assert ask_ids(engine, tuple(written.prompt), 8).text == written.text != ""
        with pytest.raises(ConfigError, match="vocabulary"):
            ask_ids(engine, (10**6,))


def test_traces_of_real_models_hold_what_their_routers_chose() -> None:
    with shape_engine(tiny_shape("olmoe"), 24) as engine:
        model, chosen = reference_model(engine), list[torch.Tensor]()
        for experts in engine.prepared.skeleton.experts:
            module = model.get_submodule(experts.path)
            module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
        recorder = RoutingRecorder(3)
        engine.record_routing(recorder)
        recorder.begin()
        answer = ask_ids(engine, PROMPT, 10, draft_length=0)
        with torch.inference_mode():
            model(input_ids=torch.tensor([[*PROMPT, *answer.tokens[:-1]]]), use_cache=False)
        trace: RoutingTrace = recorder.trace("", 8)
        assert (np.sort(trace.experts) == np.sort(torch.stack(chosen, 1).numpy())).all()
