"""A few well-known chat models with their sizes, so that a first start can propose some without asking
anybody.
Counts are those of the published configs (a test derives them again); fetches nothing, ranks by fit alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.core.types import ModelFootprint
from localmoe.experts.records import RecordLayout
from localmoe.kernels.packed_weight import packed_bytes
from localmoe.kernels.weight_forms import WeightForm

NUM_PROPOSED = 3
_FAST_ENOUGH = 5.0  # tokens/s, about what people read at


@dataclass(frozen=True, slots=True)
class Suggestion:
    """about: what it is good for, in a few words. instead_of: the repo of the same model in more bits, where
    that one does not fit; "" if there is none."""

    repo_id: str
    about: str
    facts: ModelFacts
    instead_of: str = ""


def _suggestion(
    repo_id: str, about: str, licence: str, architecture: str, *, layers: int, experts: int, top: int,
    expert_params: int, shared_params: int, kv_bytes: int, draft_expert_bytes: int, context: int, hidden: int,
    vocabulary: int, linear_params: int, tied: bool = False, file_bytes: int | None = None,
    mxfp4_expert_bytes: int = 0, state_bytes: int = 0, state_row_bytes: int = 0,
    unused_params: int = 0, gated: bool = True, wide_params: int = 0, text_alone: bool = False,
    angles: int = 256, sliding_kv_bytes: int = 0, window: int = 0, image_bytes: int = 0,
) -> Suggestion:  # fmt: skip
    """16-bit weights throughout. tied: the head is the input embedding. file_bytes: of an expert as it is
    published; None: as those. unused_params: that the files hold beside: for images, and to predict further
    tokens. gated: whether experts have a gate. wide_params: of the shared ones, kept in 32 bits. text_alone:
    whether the model also sees, which is not used here. image_bytes: of one that reads pictures. angles: a
    position in its rotary tables. sliding_kv_bytes: of kv_bytes, those of layers that see a window of so many
    positions."""
    matrices = 3 if gated else 2
    inner = expert_params // (matrices * hidden)
    layout = RecordLayout(((matrices - 1) * inner, hidden), (hidden, inner), transposed=False)
    packed = layout.bf12_bytes if layout.fits_bf12 and not mxfp4_expert_bytes else 0
    footprint = ModelFootprint(
        name=repo_id, architecture=architecture, num_layers=layers, num_experts=experts,
        experts_per_token=top, expert_params=expert_params, expert_bytes=2 * expert_params,
        shared_params=shared_params, shared_bytes=2 * (shared_params + wide_params),
        kv_bytes_per_token=kv_bytes, draft_expert_bytes=draft_expert_bytes, max_context=context,
        hidden_size=hidden,
        vocab_size=vocabulary, can_rollback=not state_bytes, state_bytes=state_bytes,
        state_row_bytes=state_row_bytes,
        mxfp4_expert_bytes=mxfp4_expert_bytes,
        bf12_expert_bytes=packed, linear_params=linear_params,
        embedding_params=0 if tied else vocabulary * hidden,
        head_saved_bytes=2 * vocabulary * hidden - packed_bytes(vocabulary, hidden),
        own_inner_size=0 if gated else inner, text_alone=text_alone,
        image_bytes=image_bytes, angles_per_token=angles,
        sliding_kv_bytes_per_token=sliding_kv_bytes, sliding_window=window,
    )  # fmt: skip
    num_bytes = 2 * shared_params + footprint.total_experts * (file_bytes or footprint.expert_bytes)
    num_bytes += 2 * unused_params
    return Suggestion(repo_id, about, ModelFacts(footprint, 2, num_bytes, licence=licence))


def _in_codes(original: Suggestion, repo_id: str, num_bytes: int, form: WeightForm) -> Suggestion:
    """The same model as it is published in FP8, NVFP4 or INT4."""
    footprint = original.facts.footprint
    inner, hidden = footprint.inner_size, footprint.hidden_size
    gated = footprint.expert_params == 3 * inner * hidden
    layout = RecordLayout(((1 + gated) * inner, hidden), (hidden, inner), transposed=False, form=form)
    footprint = replace(
        footprint, name=repo_id, coded_expert_bytes=layout.num_bytes(torch.bfloat16), coded_form=form.value
    )
    facts = replace(original.facts, footprint=footprint, num_bytes=num_bytes)
    return replace(original, repo_id=repo_id, facts=facts, instead_of=original.repo_id)


_NEMOTRON = _suggestion(
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "thinks before it answers",
    "nvidia-open-model-license", "nemotron_h",
    layers=23, experts=128, top=6, expert_params=9_977_856, shared_params=2_203_129_280, kv_bytes=6_144,
    draft_expert_bytes=5_392_128, context=262_144, hidden=2688, vocabulary=131_072,
    linear_params=1_841_946_624, state_bytes=240_418_816, state_row_bytes=41_728,
    gated=False, wide_params=7_913_472, angles=0,
)  # fmt: skip
_OLDER_QWEN = _suggestion(
    "Qwen/Qwen3-30B-A3B", "strong, many languages", "apache-2.0", "qwen3_moe",
    layers=48, experts=128, top=8, expert_params=4_718_592, shared_params=1_541_093_376, kv_bytes=98_304,
    draft_expert_bytes=2_506_752, context=40_960, hidden=2048, vocabulary=151_936,
    linear_params=1_217_134_592,
)  # fmt: skip
_QWEN = _suggestion(
    "Qwen/Qwen3.6-35B-A3B", "thinks before it answers, reads pictures", "apache-2.0", "qwen3_5_moe",
    layers=40, experts=256, top=8, expert_params=3_145_728, shared_params=2_448_355_968, kv_bytes=20_480,
    draft_expert_bytes=1_671_168, context=262_144, hidden=2048, vocabulary=248_320,
    linear_params=1_917_665_280, state_bytes=353_771_520, state_row_bytes=49_664,
    unused_params=1_298_000_000, image_bytes=335_544_320,
    angles=128,
)  # fmt: skip
SUGGESTIONS = (
    _suggestion(
        "ibm-granite/granite-3.1-1b-a400m-instruct", "small and quick", "apache-2.0", "granitemoe",
        layers=24, experts=32, top=8, expert_params=1_572_864, shared_params=126_668_800, kv_bytes=49_152,
        draft_expert_bytes=835_584, context=131_072, hidden=1024, vocabulary=49_155,
        linear_params=75_497_472, tied=True,
        angles=128,
    ),
    _suggestion(
        "ibm-granite/granite-3.1-3b-a800m-instruct", "for laptops", "apache-2.0", "granitemoe",
        layers=32, experts=40, top=8, expert_params=2_359_296, shared_params=278_894_592, kv_bytes=65_536,
        draft_expert_bytes=1_253_376, context=131_072, hidden=1536, vocabulary=49_155,
        linear_params=201_326_592, tied=True,
        angles=128,
    ),
    _suggestion(
        "allenai/OLMoE-1B-7B-0924-Instruct", "fully open, English", "apache-2.0", "olmoe",
        layers=16, experts=64, top=8, expert_params=6_291_456, shared_params=476_710_912, kv_bytes=131_072,
        draft_expert_bytes=3_342_336, context=4096, hidden=2048, vocabulary=50_304,
        linear_params=371_458_048,
    ),
    _suggestion(
        "Qwen/Qwen1.5-MoE-A2.7B-Chat", "English and Chinese", "tongyi-qianwen", "qwen2_moe",
        layers=24, experts=60, top=4, expert_params=8_650_752, shared_params=1_858_701_312, kv_bytes=196_608,
        draft_expert_bytes=4_595_712, context=8192, hidden=2048, vocabulary=151_936,
        linear_params=1_544_339_456,
    ),
    _suggestion(
        "openai/gpt-oss-20b", "thinks before it answers", "apache-2.0", "gpt_oss",
        layers=24, experts=32, top=4, expert_params=24_883_200, shared_params=1_804_459_584, kv_bytes=49_152,
        draft_expert_bytes=13_512_960, context=131_072, hidden=2880, vocabulary=201_088,
        linear_params=1_216_143_360, file_bytes=13_219_200, mxfp4_expert_bytes=13_236_480,
        angles=128,
        sliding_kv_bytes=24_576, window=128,
    ),
    _suggestion(
        "google/gemma-4-26B-A4B-it", "strong, many languages, reads pictures", "apache-2.0", "gemma4",
        layers=30, experts=128, top=8, expert_params=5_947_392, shared_params=2_395_156_480,
        kv_bytes=225_280, draft_expert_bytes=3_255_296, context=262_144, hidden=2816, vocabulary=262_144,
        linear_params=1_656_258_560, tied=True, unused_params=550_000_000, image_bytes=219_348_992,
        angles=1536,
        sliding_kv_bytes=204_800, window=1024,
    ),
    _suggestion(
        "zai-org/GLM-4.7-Flash", "thinks before it answers, writes code", "mit", "glm4_moe_lite",
        layers=46, experts=64, top=4, expert_params=9_437_184, shared_params=2_160_321_280, kv_bytes=54_144,
        draft_expert_bytes=5_013_504, context=202_752, hidden=2048, vocabulary=154_880,
        linear_params=1_836_843_008, wide_params=6_029_312, unused_params=1_278_000_000,
        angles=128,
    ),
    _NEMOTRON,
    _in_codes(_NEMOTRON, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", 20_000_000_000, WeightForm.NVFP4),
    _OLDER_QWEN,
    _in_codes(_OLDER_QWEN, "Qwen/Qwen3-30B-A3B-GPTQ-Int4", 16_900_000_000, WeightForm.INT4),
    _QWEN,
    _in_codes(_QWEN, "Qwen/Qwen3.6-35B-A3B-FP8", 37_000_000_000, WeightForm.FP8),
    _suggestion(
        "openai/gpt-oss-120b", "thinks before it answers", "apache-2.0", "gpt_oss",
        layers=36, experts=128, top=4, expert_params=24_883_200, shared_params=2_167_371_072, kv_bytes=73_728,
        draft_expert_bytes=13_512_960, context=131_072, hidden=2880, vocabulary=201_088,
        linear_params=1_534_648_320, file_bytes=13_219_200, mxfp4_expert_bytes=13_236_480,
        angles=128,
        sliding_kv_bytes=36_864, window=128,
    ),
    _suggestion(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "European languages", "apache-2.0", "mixtral",
        layers=32, experts=8, top=2, expert_params=176_160_768, shared_params=1_605_636_096,
        kv_bytes=131_072, draft_expert_bytes=93_585_408, context=32_768, hidden=4096, vocabulary=32_000,
        linear_params=1_473_249_280,
    ),
)  # fmt: skip


def propose(
    fit: Callable[[ModelFacts], Fit], suggestions: Sequence[Suggestion] = SUGGESTIONS
) -> list[tuple[Suggestion, Fit]]:
    """The largest that fit, at most NUM_PROPOSED, the one to take first: the largest that is not predicted
    to be slow. Where none fits, the smallest alone, with its reason."""
    judged = [(suggestion, fit(suggestion.facts)) for suggestion in suggestions]
    whole = {suggestion.repo_id for suggestion, found in judged if found.fits}
    fitting = [pair for pair in judged if pair[1].fits and pair[0].instead_of not in whole]
    by_size = sorted(fitting, key=_size, reverse=True)[:NUM_PROPOSED]
    if not by_size:
        return [min(judged, key=_size)] if judged else []
    return sorted(by_size, key=lambda pair: (pair[1].tokens_per_s or 0.0) < _FAST_ENOUGH)


def _size(judged: tuple[Suggestion, Fit]) -> int:
    return judged[0].facts.footprint.total_params
