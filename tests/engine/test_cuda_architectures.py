"""Architectures that nobody wrote a line for, in whole passes on a real GPU: what prompts and windows compute
is what transformers' own code computes, and drafts change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_more_architectures import ANSWERING
from support.engines import ask, device_runner_of, load_with_slots, runner_of
from support.multimodal_models import MULTIMODAL, multimodal_model
from support.tiny_models import STATEFUL_ARCHITECTURES, UNGATED_RECURRENT, tiny_model, write_model

from localmoe.model.runner import ModelRunner

pytestmark = pytest.mark.gpu
CASES: dict[str, dict[str, Any]] = {
    **{name: changes for name, changes in ANSWERING.items() if name != "deepseek_v4"},  # no float16 there
    "deepseek_v32": {**ANSWERING["deepseek_v32"], "index_topk": 512},  # all: rounding would choose
    **{name: {} for name in STATEFUL_ARCHITECTURES},
    "hybrid nemotron_h": UNGATED_RECURRENT,
    "wide gemma4_text": {**ANSWERING["gemma4_text"], "head_dim": 256, "global_head_dim": 512},
    "glm4_moe_lite": {},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 128, "intermediate_size": 128,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    },
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 128, "head_dim": 32, "rotary_dim": 16},
    "granitemoeshared": {
        "num_local_experts": 8, "intermediate_size": 128, "shared_intermediate_size": 128,
    },
    "jamba": {
        "num_experts": 8, "intermediate_size": 128, "expert_layer_period": 1, "expert_layer_offset": 0,
        "mamba_d_state": 8, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "flex_olmo": {"num_experts": 8, "intermediate_size": 128},
}  # fmt: skip
SHARED_KEYS = "shared_keys gemma4_text"  # in whole passes before transformers had a cache of its own for them
BY_LAYERS = {
    "jamba": "it keeps recurrent state", "deepseek_v32": "it keeps more than keys and values",
    SHARED_KEYS: "it keeps more than keys and values",  # or fewer, not those of each layer
}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *MULTIMODAL])
def test_whole_passes_compute_what_transformers_computes(case: str, tmp_path: Path) -> None:
    architecture, kind = case.split()[-1], transformers.AutoModelForCausalLM
    if case in MULTIMODAL:
        model, kind = multimodal_model(case, dtype=torch.float16), transformers.AutoModelForImageTextToText
    else:
        model = tiny_model(architecture, dtype=torch.float16, **CASES[case])
    folder = write_model(tmp_path / case, model)
    tokens = torch.randint(10, 250, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        rounded, wanted = (  # read from the files, so that rotary frequencies are no rounded ones
            kind.from_pretrained(folder, dtype=dtype)(torch.tensor([tokens]))
            .logits[0, 99:].float()
            for dtype in (torch.float16, torch.float32)
        )  # fmt: skip
    config: dict[str, Any] = {"device": "cuda", "context": 256, "strict": True}
    with load_with_slots(folder, 7, **config) as engine:
        runner = runner_of(engine)
        reason = None if case == SHARED_KEYS and engine.footprint.can_rollback else BY_LAYERS.get(case)
        assert isinstance(runner, ModelRunner) == (reason is not None), engine.info().passes
        assert reason is None or reason in engine.info().passes
        got = [runner.run(tokens[:100], "prefill", last_only=True)]
        got += [runner.run(tokens[at : at + 5], "verify", last_only=False) for at in range(100, 120, 5)]
        ours, theirs = (
            float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())
            for found in (torch.cat(got).cpu(), rounded)
        )  # medians, as rounding may send a token to another expert where two are as good
        assert ours <= 2 * theirs + 0.002, (ours, theirs)
        if engine.plan.drafting and not engine.footprint.state_bytes:  # those test_cache_bits compares
            windows = {5: torch.cat(got[1:])}
            for rows in (1, 9, 17):
                runner.sequence.truncate(100)
                parts = [tokens[at : min(at + rows, 120)] for at in range(100, 120, rows)]
                windows[rows] = torch.cat([runner.run(part, "verify", last_only=False) for part in parts])
            assert device_runner_of(engine).issue.all_in_kernels
            different = [rows for rows, found in windows.items() if not torch.equal(found, windows[1])]
            assert not different, "bits of a row depend on how many ride along"
        plain = ask(engine, "Once upon a time", 40, draft_length=0).tokens
        for length in (3, 8, "auto") if engine.plan.drafting else ():
            assert ask(engine, "Once upon a time", 40, draft_length=length).tokens == plain
