"""Shapes small enough for tests, engines on them, and transformers' model with an engine's random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.engine.planning import prepare_shape
from localmoe.model.shapes import ModelShape, find_shape
from support.engines import ROOMY, Answer
from support.tiny_models import tiny_config

_EXPERT_SCALE = 8


def tiny_shape(architecture: str, **changes: Any) -> ModelShape:
    """The shape of a tiny test model."""
    dimensions = tiny_config(architecture, **changes).to_diff_dict()
    for name in ("model_type", "transformers_version", "architectures"):
        dimensions.pop(name, None)
    return ModelShape(f"tiny {architecture}", architecture, dimensions)


def shape_budget(shape: ModelShape, num_slots: int, **config: Any) -> int:
    """The VRAM budget in which exactly `num_slots` experts find room beside everything else."""
    roomy = EngineConfig(**{"device": "cpu", **config, "vram_budget_bytes": ROOMY})
    plan = prepare_shape(shape, roomy, SyntheticSettings()).plan
    return plan.total_bytes + plan.slot_bytes * (num_slots - plan.num_slots)


def shape_engine(
    shape: ModelShape, num_slots: int, synthetic: SyntheticSettings | None = None, **config: Any
) -> Engine:
    """An engine on random weights, with room for `num_slots` experts. Experts of a tiny model are scaled up,
    so that which of them is used shows in the tokens."""
    budget = shape_budget(shape, num_slots, **config)
    settings = EngineConfig(**{"device": "cpu", **config, "vram_budget_bytes": budget})
    engine = Engine.load_shape(shape, settings, synthetic)
    store = engine._loaded.store
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            store.record(ExpertKey(layer, expert)).mul_(_EXPERT_SCALE)
    return engine


def ask_ids(engine: Engine, ids: tuple[int, ...], num_tokens: int = 16, **request: Any) -> Answer:
    """The answer to a prompt of token ids."""
    whole = GenerationRequest(prompt_token_ids=ids, max_new_tokens=num_tokens, **request)
    return Answer(list(engine.stream(whole)))


def shallow(name: str, layers: int) -> ModelShape:
    """A real model's shape with fewer layers, the last ones of kinds that would be missing; never fewer than
    there are kinds."""
    shape = find_shape(name)
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    for key in {"layer_types", "layers_block_type"} & shape.dimensions.keys():
        kinds = list(dict.fromkeys(shape.dimensions[key]))
        first = list(shape.dimensions[key][:layers])
        missing = [kind for kind in kinds if kind not in first]
        changes[key] = kinds if len(kinds) >= layers else [*first[: layers - len(missing)], *missing]
        changes["num_hidden_layers"] = len(changes[key])
    if "mlp_layer_types" in shape.dimensions:  # the first is dense, the others are alike
        changes["mlp_layer_types"] = shape.dimensions["mlp_layer_types"][: changes["num_hidden_layers"]]
    return replace(shape, dimensions={**shape.dimensions, **changes})


def smooth(shape: ModelShape) -> ModelShape:
    """The shape with routers whose weights move as little as what they are given: Phi-3.5-MoE's leave an
    expert out that is 2 % behind the best one, which doubles the other's weight."""
    if shape.architecture != "phimoe":
        return shape
    return replace(shape, dimensions={**shape.dimensions, "router_jitter_noise": 100.0})


def random_prompts(engine: Engine, count: int, tokens: int) -> list[GenerationRequest]:
    """Requests for answers of 24 tokens."""
    ids = np.random.default_rng(5).integers(0, engine.footprint.vocab_size, (count, tokens)).tolist()
    return [GenerationRequest(prompt_token_ids=tuple(row), max_new_tokens=24) for row in ids]


def reference_model(engine: Engine) -> Any:
    """transformers' own model, which computes everything itself, with the engine's weights."""
    skeleton, store = engine.prepared.skeleton, engine._loaded.store
    attention = "eager" if skeleton.config.model_type == "gpt_oss" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        engine.prepared.source.shape.config(),  # type: ignore[attr-defined]
        attn_implementation=attention,
        dtype=torch.float32,
    ).eval()
    state = {name: tensor for name, tensor in skeleton.model.state_dict().items() if not tensor.is_meta}
    for layer, experts in enumerate(skeleton.experts):
        views = [store.views(ExpertKey(layer, expert)) for expert in range(skeleton.num_experts)]
        for part, key in enumerate(experts.weight_keys):
            state[key] = torch.stack([view[part] for view in views]).float()
    model.load_state_dict(state, strict=True)
    return model
