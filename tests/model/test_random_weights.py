"""Random weights are complete, of the promised spread, different for every expert, and the seed's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from support.shapes import tiny_shape
from support.tiny_models import ARCHITECTURES
from torch import Tensor

from localmoe.core.errors import LoadCancelledError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import ExpertKey, Progress
from localmoe.engine.random_source import RandomSource
from localmoe.experts.host_store import HostStore
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.random_weights import SPREAD, random_draft
from localmoe.model.skeleton import Skeleton, with_records

CPU = torch.device("cpu")
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def filled(
    architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Skeleton, HostStore]:
    source = RandomSource(tiny_shape(architecture, **changes), SyntheticSettings(seed=seed))
    skeleton = source.skeleton(dtype)
    return skeleton, source.load_weights(skeleton, CPU, progress=None, cancel=None)


def shared_weights(skeleton: Skeleton) -> dict[str, Tensor]:
    return {name: p for name, p in skeleton.model.named_parameters() if not p.is_meta}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_but_the_experts_is_there_with_the_promised_values(architecture: str) -> None:
    skeleton, _ = filled(architecture)
    routed = {f"{e.path}.{name}" for e in skeleton.experts for name in ("gate_up_proj", "down_proj")}
    matrices = 0
    for name, parameter in skeleton.model.named_parameters():
        assert parameter.is_meta == (name in routed), name
        if parameter.is_meta:
            continue
        assert parameter.dtype == torch.float32 and not parameter.requires_grad
        if name.endswith("bias") or name.endswith("sinks"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            matrices += 1
            error = 5 * SPREAD / parameter.numel() ** 0.5
            assert float(parameter.std()) == pytest.approx(SPREAD, abs=error), name
            assert abs(float(parameter.mean())) < error, name
    assert matrices > 3


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_buffers_are_those_that_transformers_makes(architecture: str) -> None:
    skeleton, _ = filled(architecture)
    expected = dict(transformers.AutoModelForCausalLM.from_config(skeleton.config).named_buffers())
    buffers = dict(skeleton.model.named_buffers())
    assert buffers.keys() == expected.keys() and len(buffers) > 0
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name


def test_modules_that_an_architecture_keeps_in_float32_are_kept_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = filled("qwen2_moe", dtype=torch.bfloat16)
    assert {p.dtype for p in shared_weights(plain).values()} == {torch.bfloat16}
    kept = type(plain.model)
    monkeypatch.setattr(kept, "_keep_in_fp32_modules_strict", {"shared_expert_gate"}, raising=False)
    skeleton, _ = filled("qwen2_moe", dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in shared_weights(skeleton).items()}
    assert all((dtype == torch.float32) == ("shared_expert_gate" in name) for name, dtype in dtypes.items())


def test_tied_embeddings_stay_one_tensor() -> None:
    skeleton, _ = filled("qwen3_moe", tie_word_embeddings=True)
    head, embedding = skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings()
    assert head.weight.data_ptr() == embedding.weight.data_ptr() and not head.weight.is_meta


@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss"])
def test_every_expert_is_filled_and_differs_from_the_others(architecture: str) -> None:
    skeleton, store = filled(architecture)
    assert store.dtype == torch.bfloat16
    seen: list[Tensor] = []
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            record = store.record(ExpertKey(layer, expert)).float()
            assert record.numel() == skeleton.experts[layer].layout.elements
            assert float(record.std()) == pytest.approx(SPREAD, rel=0.05)
            assert (record.view(-1, 64) != 0).any(dim=1).all(), "part of the record was not filled"
            seen.append(record)
    for i, record in enumerate(seen):
        assert all(not torch.equal(record, other) for other in seen[:i])


@pytest.mark.parametrize(
    ("form", "said"), [(WeightForm.NVFP4, _NVFP4), (WeightForm.INT4, _INT4)], ids=["nvfp4", "int4"]
)
def test_experts_in_codes_have_the_spread_of_others(form: WeightForm, said: dict[str, object]) -> None:
    source = RandomSource(tiny_shape("qwen3_moe", quantization_config=said), SyntheticSettings())
    skeleton = with_records(source.skeleton(torch.bfloat16), form)
    assert source.coded_form(skeleton) is form
    store = source.load_weights(skeleton, CPU, progress=None, cancel=None)
    for weights in store.weights(ExpertKey(1, 3)):
        assert float(weights.float().std()) == pytest.approx(SPREAD, rel=0.02)


def test_a_seed_means_the_same_weights_and_another_seed_others() -> None:
    (one, first), (two, second), (three, third) = filled("olmoe"), filled("olmoe"), filled("olmoe", seed=1)
    key = ExpertKey(1, 3)
    assert torch.equal(first.record(key), second.record(key))
    assert not torch.equal(first.record(key), third.record(key))
    weights = [shared_weights(skeleton)["lm_head.weight"] for skeleton in (one, two, three)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_filling_reports_its_progress_and_can_be_cancelled() -> None:
    source, reports = RandomSource(tiny_shape("olmoe"), SyntheticSettings()), list[Progress]()
    source.load_weights(source.skeleton(torch.float32), CPU, progress=reports.append, cancel=None)
    assert [report.done for report in reports] == [1, 2, 3] and "synthetic" in reports[0].stage
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(LoadCancelledError):
        source.load_weights(source.skeleton(torch.float32), CPU, progress=None, cancel=cancel)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss"])
def test_a_random_draft_has_the_experts_shapes_and_the_spread_of_the_weights(
    architecture: str,
) -> None:
    skeleton, _ = filled(architecture)
    draft = random_draft(skeleton, CPU, 0, 128)
    assert [len(layer) for layer in draft] == [skeleton.num_experts] * len(skeleton.experts)
    expert, other = draft[1][2], draft[1][3]
    hidden, inner = 128, 128
    assert (expert.gate_up.in_features, expert.gate_up.out_features) == (hidden, 2 * inner)
    assert (expert.down.in_features, expert.down.out_features) == (inner, hidden)
    columns = expert.gate_up(torch.eye(hidden))
    assert float(columns.std()) == pytest.approx(SPREAD, rel=0.05)
    assert not torch.equal(columns, other.gate_up(torch.eye(hidden)))
    again = random_draft(skeleton, CPU, 0, 128)[1][2]
    assert torch.equal(columns, again.gate_up(torch.eye(hidden)))
