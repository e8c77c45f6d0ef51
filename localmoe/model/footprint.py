"""What a model needs in bytes, from its skeleton and headers: no weight is read. Decides no division of
memory."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch

from localmoe.core.draft_config import DraftForm
from localmoe.core.types import ModelFootprint
from localmoe.experts.records import RecordLayout
from localmoe.hardware.needs import PASS_PADDING
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.float8_tensors import is_float8
from localmoe.hub.int4_tensors import are_in_order, group_sizes, is_int4
from localmoe.hub.nvfp4_tensors import is_nvfp4
from localmoe.kernels.activations import detect_activation
from localmoe.kernels.int4_tiles import SPANS
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.host_embedding import embedding_params
from localmoe.model.host_linear import plain_linears
from localmoe.model.kv_trial import kv_layers
from localmoe.model.materialise import float32_names
from localmoe.model.packed_head import saved_bytes
from localmoe.model.recurrent_nets import keeps_known_state, recurrent_nets
from localmoe.model.rotary import angles_per_token, trained_context
from localmoe.model.skeleton import Skeleton
from localmoe.model.vision_kinds import find_kind
from localmoe.quant.mxfp4 import is_packed


def measure_footprint(
    name: str,
    stored: torch.dtype,
    skeleton: Skeleton,
    draft: DraftForm | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    knows_state: bool = False,
) -> ModelFootprint:
    """Counts and bytes of a model whose weights are kept in the dtype `stored`, and of its draft (None: 4-bit
    integers in groups of 128) on a device. knows_state: `keeps_known_state` has been asked, and said so."""
    layout = skeleton.experts[0].layout
    weight_bytes = stored.itemsize
    total_experts = len(skeleton.experts) * skeleton.num_experts
    expert_params = layout.elements
    all_params = sum(p.numel() for p in skeleton.model.parameters())  # tied weights once
    shared_params = all_params - total_experts * expert_params
    text = skeleton.text_config
    kept = kv_layers(skeleton.model, can_rollback=skeleton.can_rollback)
    sliding = [layer for layer in kept if layer.window is not None]
    state_bytes, state_row_bytes = _state_bytes(skeleton, weight_bytes, knows_state)
    vision = find_kind(skeleton.config)
    coded = coded_form(skeleton, stored)
    return ModelFootprint(
        name=name,
        architecture=skeleton.config.model_type,
        num_layers=len(skeleton.experts),
        num_experts=skeleton.num_experts,
        experts_per_token=skeleton.experts_per_token,
        expert_params=expert_params,
        expert_bytes=layout.num_bytes(stored),
        shared_params=shared_params,
        shared_bytes=shared_params * weight_bytes + _wide_params(skeleton.model) * (4 - weight_bytes),
        kv_bytes_per_token=sum(layer.elements for layer in kept) * weight_bytes,
        sliding_kv_bytes_per_token=sum(layer.elements for layer in sliding) * weight_bytes,
        sliding_window=max((layer.window or 0 for layer in sliding), default=0),
        draft_expert_bytes=_draft_expert_bytes(layout, draft or DraftForm(), device),
        max_context=int(getattr(text, "max_position_embeddings", 0) or 4096),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        can_rollback=skeleton.can_rollback,
        state_bytes=state_bytes,
        state_row_bytes=state_row_bytes,
        mxfp4_expert_bytes=layout.mxfp4_bytes if can_keep_mxfp4(skeleton, stored) else 0,
        bf12_expert_bytes=layout.bf12_bytes if can_pack(skeleton, stored) else 0,
        coded_expert_bytes=0 if coded is None else replace(layout, form=coded).num_bytes(stored),
        coded_form="" if coded is None else coded.value,
        expert_form=layout.form.value,
        own_inner_size=0 if layout.gated and layout.hidden == int(text.hidden_size) else layout.inner,
        linear_params=sum(linear.weight.numel() for linear in plain_linears(skeleton.model)),
        embedding_params=embedding_params(skeleton.model),
        head_saved_bytes=saved_bytes(skeleton.model, stored),
        packs_head=skeleton.packed_head is not None,
        text_alone=text is not skeleton.config and vision is None,
        image_bytes=0 if vision is None else vision.image_bytes,
        angles_per_token=angles_per_token(skeleton.model),
        trained_context=trained_context(skeleton.model),
    )


def _state_bytes(skeleton: Skeleton, element_bytes: int, known: bool) -> tuple[int, int]:
    """Of all layers, and what one needs for a row, if its recurrent state is of a known form."""
    if skeleton.can_rollback or not (known or keeps_known_state(skeleton)):
        return 0, 0
    shapes = [net.shape for net in recurrent_nets(skeleton.model).values()]
    kept = sum(shape.layer_bytes(PASS_PADDING, element_bytes) for shape in shapes)
    return kept, max(shape.row_bytes(element_bytes) for shape in shapes)


def _wide_params(model: Any) -> int:
    """Parameters that stay float32 whatever the others are."""
    names = float32_names(model)
    return (
        0 if names is None else sum(p.numel() for name, p in model.named_parameters() if names.search(name))
    )


def can_keep_mxfp4(skeleton: Skeleton, stored: torch.dtype) -> bool:
    """Whether a model is published in MXFP4, in shapes of which its records can be made, and with other
    weights in bfloat16, of which the kernel makes what it multiplies those with."""
    fits = stored == torch.bfloat16 and all(experts.layout.fits_mxfp4 for experts in skeleton.experts)
    return fits and is_packed(skeleton.config.to_dict())


def can_pack(skeleton: Skeleton, stored: torch.dtype) -> bool:
    """Whether experts can be kept in BF12, as far as shapes and this machine tell: of bfloat16, not published
    in other codes, and with gate's rows before up's."""
    if stored != torch.bfloat16 or is_packed(skeleton.config.to_dict()) or find_spec("numba") is None:
        return False
    return _in_order(skeleton) and all(experts.layout.fits_bf12 for experts in skeleton.experts)


def coded_form(skeleton: Skeleton, stored: torch.dtype) -> WeightForm | None:
    """The form, of FP8, NVFP4 and INT4, that experts are published in, if they can be kept so, likewise."""
    form = _published_form(skeleton.config.to_dict())
    if form is None or stored != torch.bfloat16 or find_spec("numba") is None:
        return None
    fits = _in_order(skeleton) and all(experts.layout.fits_codes for experts in skeleton.experts)
    return form if fits else None


def _published_form(config: dict[str, Any]) -> WeightForm | None:
    """By the config."""
    if is_nvfp4(config):
        return WeightForm.NVFP4
    if is_float8(config):
        return WeightForm.FP8
    if not is_int4(config) or not are_in_order(config):
        return None
    sizes = group_sizes(config)  # 0 is a whole row, which is a whole number of any spans
    return next((form for form, span in SPANS.items() if all(size % span == 0 for size in sizes)), None)


def _in_order(skeleton: Skeleton) -> bool:
    """Whether gate's rows come before up's."""
    activations = (detect_activation(experts.module) for experts in skeleton.experts)
    return all(activation is not None and not activation.interleaved for activation in activations)


def checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that most of the checkpoint's bytes have, or are made into."""
    weight: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        weight[tensor.dtype] = weight.get(tensor.dtype, 0) + tensor.num_bytes
    if is_int4(checkpoint.config):  # beside which others may have another one of 16 bits
        return torch.bfloat16
    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    main = max(weight, key=lambda dtype: weight[dtype], default="")
    return names.get(main, torch.bfloat16)


def _draft_expert_bytes(layout: RecordLayout, draft: DraftForm, device: Literal["cpu", "cuda"]) -> int:
    gate_up, down = layout.gate_up_shape, layout.down_shape
    if layout.transposed:
        gate_up, down = (gate_up[1], gate_up[0]), (down[1], down[0])
    return sum(_code_bytes(out, inner, draft, device) for out, inner in (gate_up, down))


def _code_bytes(out: int, inner: int, draft: DraftForm, device: Literal["cpu", "cuda"]) -> int:
    """As `group_bytes`; on a GPU a codebook has 16 values besides."""
    groups = -(-inner // draft.group_size)
    return out * groups * group_bytes(draft, device) + (64 if draft.codebook and device == "cuda" else 0)


def group_bytes(draft: DraftForm, device: Literal["cpu", "cuda"]) -> int:
    """Codes, and two 16-bit numbers a group (scale and zero point; with a codebook, a float32 scale). The
    CPU's kernel knows 4 bits alone: it keeps fewer as 4, and 8 bits or a codebook as two such matrices."""
    if device == "cuda":
        return draft.group_size * draft.bits // 8 + 4
    matrices = 2 if draft.bits == 8 or draft.codebook else 1
    return matrices * (draft.group_size // 2 + 4)
