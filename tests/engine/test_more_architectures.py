"""Architectures with odd attention or routing answer as transformers does, or are refused before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import ROOMY, ask, check_consistent, check_stats, load_with_slots
from support.tiny_models import UNGATED_RECURRENT, reference_greedy, tiny_model, write_model

from localmoe.core.config import EngineConfig
from localmoe.core.errors import UnsupportedModelError
from localmoe.engine import Engine

GROUPS = {"n_group": 1, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "qk_head_dim": 48, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, **GROUPS,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 16}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
ROUTED_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 128}
WINDOW = {"sliding_window": 16}

ANSWERING: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**ROUTED_EXPERTS, **LATENT, "head_dim": 16},
    "glm4_moe": {**ROUTED_EXPERTS, **GROUPS, "first_k_dense_replace": 1, "head_dim": 32},
    "afmoe": {**EXPERTS, **WINDOW, "num_dense_layers": 1, "head_dim": 32},  # views attention's output
    "laguna": {**EXPERTS, **WINDOW, "head_dim": 32},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 128},  # scales scores and logits
    "gemma4_text": {  # experts beside a dense layer, two head sizes, values that are keys
        **EXPERTS, **WINDOW, "enable_moe_block": True, "top_k_experts": 3, "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1, "global_head_dim": 64, "head_dim": 32, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "nemotron_h": UNGATED_RECURRENT,  # experts without a gate, layers that are experts or attention alone
    "attending nemotron_h": {  # whose experts are narrower than what is between layers
        "layers_block_type": ["moe", "full_attention", "mlp", "full_attention", "moe"], "moe_latent_size": 64,
    },
}  # fmt: skip

RECURRENT = {"lfm2_moe", "nemotron_h"}

REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**ROUTED_EXPERTS, **INDEXED},  # keeps an index beside keys and values
    "minimax": {  # a cache class of its own
        "num_local_experts": 8, "intermediate_size": 128, "block_size": 16, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "llama4_text": {"num_local_experts": 8, "intermediate_size": 128, "head_dim": 32},  # other experts
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERING)
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_model(case.split()[-1], **ANSWERING[case])
    folder = write_model(tmp_path / case, model)
    with load_with_slots(folder, 6) as engine:
        assert engine.plan.drafting == (case not in RECURRENT)
        for prompt in ("Hello there, how are", "far more than one sliding window is long: " * 2):
            for draft_length in (0, "auto", *((4,) if engine.plan.drafting else ())):
                answer = ask(engine, prompt, 10, draft_length=draft_length)
                assert answer.tokens == reference_greedy(model, answer.prompt, 10), (prompt, draft_length)
                check_stats(answer)
        check_consistent(engine)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_taken_over_is_refused_before_weights_are_read(
    architecture: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / architecture, tiny_model(architecture, **REFUSED[architecture]))
    reports: list[object] = []
    with pytest.raises(UnsupportedModelError, match=architecture) as refusal:
        Engine.load(str(folder), EngineConfig(vram_budget_bytes=ROOMY), progress=reports.append)
    assert not reports and "\n" not in str(refusal.value)
