"""Whether a model fits, before it is here: the same answer as the planner's for the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hub_home import REPO, hub_and_home
from support.hub_server import HubServer, files_of
from support.tiny_models import tiny_model, write_model

from localmoe.core.config import EXPERTS_ON, EngineConfig, ExpertsOn
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import BudgetError, DownloadError, HubUnreachableError, UnsupportedModelError
from localmoe.core.model_facts import Fit, ModelFacts, MtpSizes
from localmoe.engine.facts import local_facts, published_dtype, repo_facts
from localmoe.engine.fit import budget_range, fit_model, with_draft_bits, with_given_back
from localmoe.engine.loading import out_of_memory
from localmoe.engine.planning import plan_model
from localmoe.engine.pulling import check_is_gptq
from localmoe.engine.suggestions import NUM_PROPOSED, SUGGESTIONS, propose
from localmoe.hardware.facts import Gpu, Hardware
from localmoe.hardware.limits import Rates
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.footprint import measure_footprint
from localmoe.model.shapes import SHAPES
from localmoe.model.skeleton import skeleton_from_config

Tiny = Callable[[str], Path]
GIB = 1 << 30
RATES = Rates(400e9, 25e9)
GPU = Gpu(0, "a card", 12 * GIB, 11 * GIB, None, (8, 9), 4, 16, 25e9, 400e9)
RAM_BYTES = (64 * GIB, 60 * GIB)
COMPUTER = Hardware((GPU,), "", "a CPU", 8, 16, (), *RAM_BYTES, 500 * GIB, 20e9, "Linux", "3.12", "2")
WITHOUT_GPU = replace(COMPUTER, gpus=())
BY_NAME = {suggestion.repo_id.split("/")[1]: suggestion.facts for suggestion in SUGGESTIONS}
QWEN = BY_NAME["Qwen1.5-MoE-A2.7B-Chat"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def test_the_hubs_facts_are_those_of_the_model_itself(hub: HubServer, tiny16: Tiny) -> None:
    folder = tiny16("qwen2_moe")
    files = files_of(folder)
    commit = hub.commit(REPO, {**files, "README.md": b"x" * 999})
    hub.repos[REPO].licence = "apache-2.0"
    there, here = repo_facts(REPO), local_facts(str(folder))
    assert replace(there.footprint, name="") == replace(here.footprint, name="")
    assert (there.weight_bytes, there.unsuited, there.licence) == (
        here.weight_bytes,
        here.unsuited,
        "apache-2.0",
    )
    assert (there.revision, there.gated) == (commit, False)
    assert there.num_bytes == sum(map(len, files.values())) - len(files.get("README.md", b""))
    assert ModelFacts.from_dict(there.as_dict()) == there
    assert not hub.bodies(".safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_that_are_published_in_other_dtypes_are_counted_so(
    dtype: torch.dtype, hub: HubServer, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", tiny_model("qwen2_moe", dtype=dtype))
    hub.commit(REPO, files_of(folder))
    there, here = repo_facts(REPO), local_facts(str(folder))
    assert there.weight_bytes == dtype.itemsize and there.footprint.bf12_expert_bytes == 0
    assert replace(there.footprint, name="") == replace(here.footprint, name="")


def test_a_config_may_say_the_dtype_of_its_part_for_text_or_nothing() -> None:
    assert published_dtype({"text_config": {"dtype": "float16"}}) == torch.float16
    assert published_dtype({"torch_dtype": "float32", "text_config": {"dtype": "float16"}}) == torch.float32
    eight = {"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}}
    four = {**eight, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    for config in (eight, four):
        assert published_dtype(config) == torch.bfloat16, "of which a load makes that, whatever they were"
    assert published_dtype({"dtype": "float8_e4m3fn"}) == published_dtype({}) == torch.bfloat16


def test_what_cannot_be_looked_at_says_why(
    hub: HubServer, tiny16: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tiny16("qwen2_moe"))
    hub.commit("a/dense", {**files, "config.json": b'{"model_type": "llama"}'})
    hub.commit("a/bare", {"README.md": b"x"})
    with pytest.raises(UnsupportedModelError, match="no Mixture-of-Experts"):
        repo_facts("a/dense")
    with pytest.raises(DownloadError, match=r"no config\.json"):
        repo_facts("a/bare")
    hub.api_faults.append(502)
    with pytest.raises(HubUnreachableError, match="502"):
        repo_facts("a/dense")
    with pytest.raises(UnsupportedModelError, match="not quantised"):
        check_is_gptq("a/b", {})
    with pytest.raises(UnsupportedModelError, match=r"otherwise \(awq\)"):
        check_is_gptq("a/b", {"quantization_config": {"quant_method": "awq"}})
    check_is_gptq("a/b", {"quantization_config": {"quant_method": "gptq"}})


def test_a_fit_is_the_planners_own_plan(tiny16: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny16("qwen2_moe"))
    facts = local_facts(folder)
    monkeypatch.setattr("localmoe.engine.planning.probe_hardware", lambda measure: WITHOUT_GPU)
    for config in (
        EngineConfig(device="cpu"),
        EngineConfig(device="cpu", vram_budget_bytes=8 << 20, context=128),
    ):
        _, plan = plan_model(folder, config)
        fit = fit_model(facts, WITHOUT_GPU, RATES, config)
        assert fit.fits and (fit.context, fit.drafting) == (plan.context, plan.drafting)
        assert (fit.vram_bytes, fit.ram_bytes) == (0, plan.host_bytes + plan.total_bytes)
    small = EngineConfig(device="cpu", vram_budget_bytes=1 << 20)
    with pytest.raises(BudgetError) as refusal:
        plan_model(folder, small)
    fit = fit_model(facts, WITHOUT_GPU, RATES, small)
    assert not fit.fits and fit.reason == str(refusal.value)
    assert fit.budget_bytes is not None and f"{fit.budget_bytes >> 10}KiB" in fit.reason
    better = fit_model(facts, WITHOUT_GPU, RATES, replace(small, vram_budget_bytes=fit.budget_bytes))
    assert better.fits  # the budget that is named works
    if fit.better_context is not None:
        assert fit_model(facts, WITHOUT_GPU, RATES, replace(small, context=fit.better_context)).fits


def test_the_tiers_of_a_card_and_what_does_not_fit_it() -> None:
    fit = fit_model(QWEN, COMPUTER, RATES)
    assert fit.fits and fit.device == "cuda" and 0 < fit.vram_bytes <= 11 * GIB
    experts = QWEN.footprint.total_experts * QWEN.footprint.bf12_expert_bytes
    assert fit.ram_bytes == experts + 2 * 151_936 * 2048, "and the input embedding"
    assert fit.tokens_per_s is not None and fit.tokens_per_s > 1
    tight = replace(COMPUTER, ram_available_bytes=16 * GIB)
    refused = fit_model(QWEN, tight, RATES)
    assert not refused.fits and "18.3 GiB of host RAM" in refused.reason
    assert fit_model(QWEN, tight, None).tokens_per_s is None
    given_back = with_given_back(tight, 2 * GIB, 30 * GIB)
    assert given_back.ram_available_bytes == 46 * GIB and given_back.gpus[0].free_bytes == 12 * GIB
    assert fit_model(QWEN, given_back, RATES).fits
    no_disk = fit_model(QWEN, COMPUTER, RATES, download_bytes=501 * GIB)
    assert not no_disk.fits and "1.1 GiB too little" in no_disk.reason and no_disk.missing_disk_bytes > GIB
    assert fit_model(QWEN, COMPUTER, None, EngineConfig(context=10_000)).context == 8192  # all that it has


def test_an_mtp_layer_drafts_in_the_place_of_all_layers_in_low_bits_where_all_is_left_to_us() -> None:
    sizes = MtpSizes(shared_params=20_000_000, buffer_bytes=0, kv_elements_per_token=4096, inner_size=1408)
    facts = replace(QWEN, mtp=sizes)
    whole = fit_model(facts, COMPUTER, RATES, EngineConfig(drafter="self"))
    layer = fit_model(facts, COMPUTER, RATES)
    assert whole.drafting and not whole.by_mtp and layer.drafting and layer.by_mtp
    assert whole.plan is not None and layer.plan is not None
    assert layer.plan.draft_bytes < whole.plan.draft_bytes / 10
    assert layer.plan.num_slots > whole.plan.num_slots
    assert fit_model(facts, COMPUTER, RATES, EngineConfig(draft_length=4)).by_mtp
    for config in (
        EngineConfig(draft_bits=8), EngineConfig(draft_length=0),
        EngineConfig(strict=True, drafter="self"),
    ):  # fmt: skip
        assert not fit_model(facts, COMPUTER, RATES, config).by_mtp
    assert not fit_model(facts, WITHOUT_GPU, RATES).by_mtp


@settings(max_examples=60)
@given(
    ram=st.integers(0, 1 << 38), vram=st.integers(0, 1 << 37), gpu=st.booleans(),
    disk=st.integers(0, 1 << 40),
    name=st.sampled_from(sorted(BY_NAME)), budget=st.none() | st.integers(1, 1 << 38),
    rate=st.sampled_from([1e-300, 1.0, 1e9, 1e300]), experts_on=st.sampled_from(EXPERTS_ON),
)  # fmt: skip
def test_no_machine_makes_a_nan_or_a_plan_beyond_what_is_free(
    ram: int, vram: int, gpu: bool, disk: int, name: str, budget: int | None, rate: float,
    experts_on: ExpertsOn,
) -> None:  # fmt: skip
    card = replace(GPU, total_bytes=max(vram, 1), free_bytes=vram)
    computer = replace(
        COMPUTER, gpus=(card,) if gpu else (), ram_total_bytes=max(ram, 1), ram_available_bytes=ram,
        disk_free_bytes=disk,
    )  # fmt: skip
    config = EngineConfig(vram_budget_bytes=budget, experts_on=experts_on)
    facts = BY_NAME[name]
    fit = fit_model(facts, computer, Rates(rate, rate), config, download_bytes=facts.num_bytes)
    assert fit.fits == (fit.reason == "")
    assert fit.tokens_per_s is None or (math.isfinite(fit.tokens_per_s) and fit.tokens_per_s > 0)
    if fit.fits:
        assert fit.ram_bytes <= ram and disk >= facts.num_bytes + fit.disk_bytes
        assert 0 < fit.ram_share <= 1 and (fit.disk_bytes > 0) == (experts_on == "disk")
        assert fit.vram_bytes <= (vram if budget is None else budget)


# of what sees, and of a layer that predicts further tokens, with an embedding and a head of its own
UNUSED = {"gemma-4-26B-A4B-it": 550_000_000, "GLM-4.7-Flash": 1_278_000_000}
WHOLE = {
    "qwen3.5-35b-a3b": "qwen3_5_moe", "qwen3.5-35b-a3b-fp8": "qwen3_5_moe", "gemma-4-26b-a4b": "gemma4",
}  # fmt: skip


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"), ("Qwen1.5-MoE-A2.7B-Chat", "qwen1.5-moe-a2.7b"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"), ("Qwen3.6-35B-A3B", "qwen3.5-35b-a3b"),
        ("Qwen3.6-35B-A3B-FP8", "qwen3.5-35b-a3b-fp8"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "nemotron-3-nano-nvfp4"),
        ("Qwen3-30B-A3B-GPTQ-Int4", "qwen3-30b-a3b-int4"),
        ("gemma-4-26B-A4B-it", "gemma-4-26b-a4b"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("gpt-oss-20b", "gpt-oss-20b"), ("gpt-oss-120b", "gpt-oss-120b"),
        ("GLM-4.7-Flash", "glm-4.7-flash"),
        ("granite-3.1-1b-a400m-instruct", (24, 1024, 16, 32)),
        ("granite-3.1-3b-a800m-instruct", (32, 1536, 24, 40)),
    ],
)  # fmt: skip
def test_the_proposed_models_have_the_sizes_that_their_configs_make(name: str, shape: Any) -> None:
    if shape in WHOLE:  # the text part of a larger model
        text = dict(SHAPES[shape].dimensions)
        said = {name: text.pop(name) for name in ("quantization_config",) if name in text}
        config = transformers.AutoConfig.for_model(
            WHOLE[shape], text_config=text, vision_config={"hidden_size": 1152}, **said
        )
    elif isinstance(shape, str):
        config = SHAPES[shape].config()
    else:
        layers, hidden, heads, experts = shape
        config = transformers.AutoConfig.for_model(
            "granitemoe", vocab_size=49155, hidden_size=hidden, intermediate_size=512, num_experts_per_tok=8,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            num_local_experts=experts, max_position_embeddings=131072, tie_word_embeddings=True,
        )  # fmt: skip
    skeleton = skeleton_from_config(config, torch.bfloat16, name)
    facts = BY_NAME[name]
    assert facts.footprint == measure_footprint(facts.footprint.name, torch.bfloat16, skeleton)
    if shape == "qwen3.5-35b-a3b":
        with torch.device("meta"):
            whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        further = [*whole.model.visual.parameters(), *skeleton.model.model.layers[3].parameters()]
        unused = sum(p.numel() for p in further) + 2 * config.text_config.hidden_size**2
        assert facts.num_bytes - 2 * facts.footprint.total_params == pytest.approx(2 * unused, rel=0.01)
        return
    if shape == "qwen3.5-35b-a3b-fp8":  # its experts; other layers are partly in FP8 too
        assert facts.num_bytes == pytest.approx(1.07 * facts.footprint.total_params, rel=0.01)
        return
    if shape == "nemotron-3-nano-nvfp4":  # likewise, in FP8
        experts = facts.footprint.total_experts * facts.footprint.expert_params
        assert 9 / 16 * experts < facts.num_bytes < 9 / 16 * experts + facts.footprint.shared_bytes
        return
    if (
        shape == "qwen3-30b-a3b-int4"
    ):  # of 128 columns 64 bytes, a scale and half a byte; what has 16 bits too
        codes = facts.footprint.total_experts * facts.footprint.expert_params + facts.footprint.linear_params
        codes -= facts.footprint.vocab_size * facts.footprint.hidden_size  # the head
        others = facts.footprint.total_params - codes
        assert facts.num_bytes == pytest.approx(66.5 / 128 * codes + 2 * others, rel=0.01)
        return
    if name in UNUSED:
        assert facts.num_bytes == 2 * (facts.footprint.total_params + UNUSED[name])
        return
    if not name.startswith("gpt-oss"):  # published in MXFP4: 32 weights in 17 bytes
        assert facts.num_bytes == 2 * facts.footprint.total_params
        return
    in_experts = facts.footprint.total_experts * facts.footprint.expert_params
    assert facts.num_bytes == facts.footprint.shared_bytes + in_experts * 17 // 32


def test_three_that_fit_are_proposed_the_quick_ones_first_or_the_smallest_with_its_reason() -> None:
    chosen = propose(lambda facts: fit_model(facts, COMPUTER, RATES))
    assert len(chosen) == NUM_PROPOSED and all(fit.fits for _, fit in chosen)
    sizes = [2 * suggestion.facts.footprint.total_params for suggestion, _ in chosen]
    assert all(fit.ram_bytes <= COMPUTER.ram_available_bytes for _, fit in chosen) and sizes[0] > 20 * GIB
    slow = propose(lambda facts: fit_model(facts, COMPUTER, Rates(4e9, 1e9)))
    speeds = [(fit.tokens_per_s or 0) >= 5 for _, fit in slow]
    assert speeds == sorted(speeds, reverse=True)
    ((smallest, fit),) = propose(
        lambda facts: fit_model(facts, replace(COMPUTER, ram_available_bytes=GIB), RATES)
    )
    assert "1b" in smallest.repo_id and not fit.fits and fit.reason


def test_what_is_published_in_fewer_bits_is_proposed_where_the_original_does_not_fit() -> None:
    names = []
    for gib in (60, 40, 24):
        computer = replace(COMPUTER, ram_available_bytes=gib * GIB, ram_total_bytes=gib * GIB)
        found = propose(lambda facts, computer=computer: fit_model(facts, computer, RATES))  # type: ignore[misc]
        names.append([one.repo_id for one, _ in found])
    whole, packed = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B-FP8"
    assert whole in names[0] and packed not in names[0]
    assert packed in names[1] and whole not in names[1]
    nano = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"
    assert f"{nano}-NVFP4" in names[2] and f"{nano}-BF16" not in names[2]
    assert propose(lambda facts: Fit(False), []) == []


def test_memory_that_runs_out_while_loading_names_a_budget_that_is_smaller() -> None:
    error = out_of_memory(12 * GIB)
    assert error.budget_bytes == 10 * GIB and "10240MiB" in str(error)


def test_the_budgets_to_choose_from_all_work_and_none_below_does() -> None:
    for machine, config in (
        (COMPUTER, EngineConfig()), (WITHOUT_GPU, EngineConfig(context=2048)),
        (COMPUTER, EngineConfig(vram_budget_bytes=1, draft_length=0)),
    ):  # fmt: skip
        found = budget_range(QWEN, machine, config)
        assert found is not None and found.least_bytes < found.most_bytes <= found.free_bytes
        for budget in (found.least_bytes, (found.least_bytes + found.most_bytes) // 2, found.most_bytes):
            given_back = replace(config, vram_budget_bytes=budget, draft_length="auto")
            plan = fit_model(QWEN, machine, RATES, given_back).plan
            assert plan is not None and plan.budget_bytes == budget >= plan.total_bytes
        less = replace(config, vram_budget_bytes=found.least_bytes - (1 << 20), draft_length=0)
        assert not fit_model(QWEN, machine, RATES, less).fits
    assert budget_range(QWEN, replace(COMPUTER, ram_available_bytes=GIB)) is None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_drafts_bits_change_what_it_takes_as_its_headers_would(bits: int) -> None:
    shape = SHAPES["qwen1.5-moe-a2.7b"]
    skeleton = skeleton_from_config(shape.config(), torch.bfloat16, "x")
    facts = ModelFacts(measure_footprint("x", torch.bfloat16, skeleton), 2, 1)
    for device in ("cpu", "cuda"):
        wanted = measure_footprint("x", torch.bfloat16, skeleton, DraftForm(bits), device)
        assert with_draft_bits(facts, bits, device=device).footprint == wanted
        back = with_draft_bits(with_draft_bits(facts, bits, device=device), 4, bits, device)
        assert back == facts
    packed = LowBitExperts.empty(1, 2048, 1408, bits, 128, "cpu").num_bytes  # as the GPU's kernels keep it
    assert 0.94 < packed / wanted.draft_expert_bytes <= 1.0


def test_lanes_that_cannot_be_are_refused_before_the_load() -> None:
    refused = fit_model(QWEN, WITHOUT_GPU, RATES, EngineConfig(lanes="vram+cpu"))
    assert not refused.fits and "--lanes auto" in refused.reason
    assert fit_model(QWEN, COMPUTER, RATES, EngineConfig(lanes="vram+cpu")).fits
