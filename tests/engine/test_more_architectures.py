"""Architectures with odd attention or routing answer as transformers does, or are refused before loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engines import ROOMY, ask, check_consistent, check_stats, load_with_slots
from support.shapes import ask_ids
from support.tiny_models import UNGATED_RECURRENT, reference_greedy, tiny_model, write_model

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.errors import UnsupportedModelError
from localmoe.engine import Engine
from localmoe.model.cached_pass import cached_pass
from localmoe.model.kv_trial import kv_elements_per_token
from localmoe.model.skeleton import skeleton_from_config

GROUPS = {"n_group": 1, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "qk_head_dim": 48, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, **GROUPS,
}  # fmt: skip
# of few heads the scores of many positions are zero alike: which of them count depends on a pass's width
INDEXED = {**LATENT, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 16}
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
    "mimo_v2_flash": {**ROUTED_EXPERTS, **WINDOW, "head_dim": 48, "v_head_dim": 32},  # sinks, narrower values
    "hunyuan_v1_moe": {  # says of each layer how many experts a token uses
        "num_experts": 8, "intermediate_size": 128, "head_dim": 32, "num_experts_per_tok": [3, 3, 3],
    },
    "deepseek_v32": {**ROUTED_EXPERTS, **INDEXED},  # keeps an index beside keys and values
    "deepseek_v4": {  # pools keys, has several streams between layers, chooses experts by token first
        **INDEXED, **WINDOW, "n_routed_experts": 8, "moe_intermediate_size": 128, "num_key_value_heads": 1,
        "head_dim": 64, "o_groups": 2, "o_lora_rank": 32, "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}  # fmt: skip

ANSWERING["shared_keys gemma4_text"] = {  # the last layer reads the keys of one before it
    **ANSWERING["gemma4_text"], "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
# keep more than keys and values, or not those of each layer
UNDRAFTED = {"lfm2_moe", "nemotron_h", "deepseek_v32", "deepseek_v4", "shared_keys gemma4_text"}

REFUSED: dict[str, dict[str, Any]] = {
    "minimax": {  # a cache class of its own
        "num_local_experts": 8, "intermediate_size": 128, "block_size": 16, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "llama4_text": {"num_local_experts": 8, "intermediate_size": 128, "head_dim": 32},  # other experts
}  # fmt: skip


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", ANSWERING)
def test_greedy_answers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_model(case.split()[-1], **ANSWERING[case])
    folder = write_model(tmp_path / case, model)
    with load_with_slots(folder, 6) as engine:
        assert engine.plan.drafting == (case not in UNDRAFTED)
        for prompt in ("Hello there, how are", "far more than one sliding window is long: " * 2):
            for draft_length in (0, "auto", *((4,) if engine.plan.drafting else ())):
                answer = ask(engine, prompt, 10, draft_length=draft_length)
                assert answer.tokens == reference_greedy(model, answer.prompt, 10), (prompt, draft_length)
                check_stats(answer)
        for length in (
            (300, 301) if case in UNDRAFTED else ()
        ):  # a prompt of several passes, then a second turn
            ids = np.random.default_rng(length).integers(6, 256, length).tolist()
            first = ask_ids(engine, tuple(ids), 6, draft_length=0).tokens
            assert first == reference_greedy(model, ids, 6)
            going_on = [*ids, *first, *ids[:5]]
            second = ask_ids(engine, tuple(going_on), 6, draft_length=0)
            assert second.tokens == reference_greedy(model, going_on, 6)
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


def test_code_that_is_published_beside_a_known_architecture_is_left_alone(tmp_path: Path) -> None:
    """As DeepSeek-V2's and Phi-3.5-MoE's, which are older than transformers' own."""
    model = tiny_model("deepseek_v2")
    folder = write_model(tmp_path / "with code", model)
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text("raise SystemExit('code of the model ran')")
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}
    classes |= {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
    with load_with_slots(folder, 6) as engine:
        answer = ask(engine, "Hello there, how are", 8)
        assert answer.tokens == reference_greedy(model, answer.prompt, 8)


@pytest.mark.parametrize(("context", "lengths"), [(128, (3, 40)), (512, (150, 200))])
def test_angles_that_depend_on_the_texts_length_are_those_of_the_context(
    context: int, lengths: tuple[int, int], tmp_path: Path
) -> None:
    """As in Phi-3.5-MoE's published config. Texts on either side of the original length."""
    model = tiny_model("phimoe")
    folder = write_model(tmp_path / "phi", model)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    scaling: dict[str, object] = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    scaling |= {"original_max_position_embeddings": 128, "short_mscale": 1.0, "long_mscale": 1.4}
    config |= {"rope_scaling": scaling, "rope_theta": 10000.0, "sliding_window": 512}
    (folder / "config.json").write_text(json.dumps(config))
    transformers_own = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with load_with_slots(folder, 6, context=context) as engine:
        for length in lengths:
            prompt = torch.randint(10, 250, (length,), generator=torch.Generator().manual_seed(length))
            request = GenerationRequest(prompt_token_ids=tuple(prompt.tolist()), max_new_tokens=8)
            tokens = [token for event in engine.stream(request) for token in event.token_ids]
            assert tokens == reference_greedy(transformers_own, prompt.tolist(), 8), length


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32", "gemma4_text", "lfm2_moe"])
def test_all_that_layers_keep_of_a_token_is_planned(case: str) -> None:
    """An index beside keys and values too; a recurrent state is not of a token."""
    wide = {"sliding_window": 64} if case == "gemma4_text" else {}  # in which nothing is dropped here
    model = tiny_model(case, **{**ANSWERING[case], **wide})
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        for tokens in (8, 8):  # what the second pass adds is of its tokens
            before = _kept_bytes(cache)
            cached_pass(model, torch.full((1, tokens), 9), torch.arange(tokens)[None], cache)
    skeleton = skeleton_from_config(model.config, torch.float32, case)
    kept = _kept_bytes(cache) - before
    assert 4 * kv_elements_per_token(skeleton.model, can_rollback=skeleton.can_rollback) * 8 == kept > 0


def _kept_bytes(cache: Any) -> int:
    tensors = (tensor for layer in cache.layers for tensor in vars(layer).values())
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
