"""What the next layer's gate makes of a layer's input: against transformers' own routers, for every
family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ask

from localmoe.core.events import NextGateGuessed
from localmoe.engine import Engine
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.next_gate import find_gates, guess
from localmoe.model.skeleton import build_skeleton

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "phimoe", "olmoe", "gpt_oss", "lfm2_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gate_of_every_layer_is_found_and_asked(
    family: str, tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, shared = tiny(family)
    model = copy.deepcopy(shared)
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    if family == "lfm2_moe":  # it adds something for the choice, and only says so to its router
        for experts in skeleton.experts:
            model.get_submodule(experts.path.rpartition(".")[0]).expert_bias.normal_()
        skeleton.model.to_empty(device="cpu")
    skeleton.model.load_state_dict(model.state_dict(), assign=True, strict=False)
    gates = find_gates(skeleton)
    assert len(gates) == len(skeleton.experts) and None not in gates
    hidden = torch.randn(3, skeleton.text_config.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer, experts in enumerate(skeleton.experts):
        parent = model.get_submodule(experts.path.rpartition(".")[0])
        given: list[Any] = []
        hook = parent.experts.register_forward_pre_hook(
            lambda module, args, kwargs, given=given: given.extend((*args, *kwargs.values())),
            with_kwargs=True,
        )
        with torch.inference_mode():
            parent(hidden[None])
            index, weights = given[1:3]
            found = guess(gates, layer, hidden, skeleton.num_experts)
        hook.remove()
        wanted: dict[int, float] = {}
        for expert, weight in zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True):
            wanted[expert] = wanted.get(expert, 0.0) + weight
        assert found is not None and (found.layer, found.num_tokens) == (layer, 3)
        assert dict(zip(found.experts, found.weights, strict=True)) == pytest.approx(wanted, rel=1e-5)
        assert list(found.weights) == sorted(found.weights, reverse=True)
    num_experts = skeleton.num_experts
    assert guess(gates, len(gates), hidden, num_experts) is None
    assert guess([None], 0, hidden, num_experts) is None


@pytest.mark.parametrize("none", [-1, 8, 100])
def test_what_is_no_expert_is_not_guessed(none: int) -> None:
    """As where a router fills up what it does not choose."""
    hidden, weights = torch.zeros(2, 4), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    experts = torch.tensor([[7, none], [7, 2]])
    found = guess([lambda x: (weights, experts)], 0, hidden, 8)
    assert found is not None and found.experts == (7, 2)
    assert found.weights == pytest.approx((1.3, 0.3))
    found = guess([lambda x: (weights, torch.full((2, 2), none))], 0, hidden, 8)
    assert found is not None and found.experts == found.weights == ()


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x,
        lambda x: (x, x[:, :2]),
        lambda x: (x, x[:, :2], None),
        lambda x: (x, x[:, :2], x[:, :2]),
        lambda x: (x, x[:, :2], torch.zeros(1, 3, dtype=torch.int64)),
        lambda x: (x, x[0, :2], torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_router_that_answers_otherwise_is_none(
    answer: Callable[[torch.Tensor], object], tiny: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = tiny("mixtral")
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    skeleton.model.load_state_dict(model.state_dict(), assign=True, strict=False)
    parent = skeleton.model.get_submodule(skeleton.experts[1].path.rpartition(".")[0])
    parent.gate.forward = answer
    gates = find_gates(skeleton)
    assert gates[1] is None and gates[0] is not None


def test_either_order_of_an_answer_is_understood(tiny: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = tiny("mixtral")
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    skeleton.model.load_state_dict(model.state_dict(), assign=True, strict=False)
    router = skeleton.model.get_submodule(skeleton.experts[0].path.rpartition(".")[0]).gate
    hidden = torch.randn(3, skeleton.text_config.hidden_size)
    wanted = find_gates(skeleton)[0](hidden)
    usual = router.forward
    router.forward = lambda x: usual(x)[::-1]
    found = find_gates(skeleton)[0](hidden)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_guesses_are_made_for_decoding_only_and_change_no_token(
    tiny_engine: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("qwen2_moe")
    told: list[NextGateGuessed] = []
    scheduler = engine._loaded.passes.scheduler
    plain = ask(engine, "Once upon a time", 8, policy="on-demand", draft_length=2).tokens
    notify = scheduler.notify

    def hear(event: Any) -> None:
        if isinstance(event, NextGateGuessed):
            told.append(event)
        notify(event)

    monkeypatch.setattr(scheduler, "notify", hear)
    engine.reset()
    answer = ask(engine, "Once upon a time", 8, policy="adapmoe", draft_length=2)
    layers = engine.footprint.num_layers
    assert answer.tokens == plain
    assert [e.layer for e in told] == list(range(1, layers)) * answer.stats.steps
    assert all(1 <= e.num_tokens <= 3 for e in told)
    told.clear()
    ask(engine, "Once upon a time", 8, policy="on-demand", draft_length=2)
    assert told == []
