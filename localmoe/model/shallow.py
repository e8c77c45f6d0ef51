"""The same model with fewer layers, as few as show every kind of layer, and with weights that mean nothing:
enough to see which kernels the whole model launches. Runs nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from localmoe.core.errors import UnsupportedModelError
from localmoe.model.materialise import float32_names, rebuild_buffers
from localmoe.model.packed_head import PackedHead
from localmoe.model.random_weights import SPREAD
from localmoe.model.skeleton import Skeleton, skeleton_from_config, with_records
from localmoe.model.tying import share_ties

_LAYER = re.compile(r"^(.*?\.)(\d+)((?:\..*)?)$")
_OF_NO_KERNEL = {"layer_idx", "store_full_length_kv"}  # the last one of a kind says so, for layers without
# how configs say that a layer has experts, by its number
_ALL_WITH_EXPERTS = MappingProxyType(
    {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}
)
_LEAST_ROUTED = 2  # MoE layers: rows of tables may be aligned otherwise from the second one on


def layer_kinds(skeleton: Skeleton) -> list[Hashable]:
    """One entry a decoder layer; layers that compute alike have equal ones."""
    text = skeleton.text_config
    parts: list[list[Hashable]] = [[] for _ in range(int(text.num_hidden_layers))]
    for name, module in skeleton.model.named_modules():
        found = _LAYER.match(name)
        if found is not None and int(found[2]) < len(parts):
            shapes = [(key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)]
            settings = [(key, value) for key, value in vars(module).items() if _is_setting(key, value)]
            parts[int(found[2])].append((found[1], found[3], type(module), *shapes, *settings))
    types = getattr(text, "layer_types", None) or [None] * len(parts)
    return [(kind, *found) for kind, found in zip(types, parts, strict=True)]


def _is_setting(key: str, value: object) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain and not key.startswith("_") and key not in _OF_NO_KERNEL


def decoder_layers(skeleton: Skeleton) -> tuple[nn.Module, str]:
    """The module that runs the layers with the experts, and its attribute that lists them."""
    found = _LAYER.match(skeleton.experts[0].path)
    assert found is not None, f"experts outside a layer: {skeleton.experts[0].path}"
    owner, _, attribute = found[1].rstrip(".").rpartition(".")
    return skeleton.model.get_submodule(owner), attribute


def depth_of_all(skeleton: Skeleton, kinds: Sequence[Hashable]) -> int:
    """How many of the first layers are together of every kind. kinds: of each decoder layer."""
    last = max(kinds.index(kind) for kind in set(kinds))
    return 1 + max(last, *(experts.decoder_layer for experts in skeleton.experts[:_LEAST_ROUTED]))


def shallow_skeleton(skeleton: Skeleton, dtype: torch.dtype) -> Skeleton:
    """The model without weights, to compute in `dtype`, cut after the first layers that together are of every
    kind. Call it where nothing else builds models: transformers changes PyTorch's defaults meanwhile.

    Raises:
        UnsupportedModelError: with fewer layers it would be another model.
    """
    kinds = layer_kinds(skeleton)
    depth = depth_of_all(skeleton, kinds)
    cut = _with_layers(skeleton, kinds, range(depth), dtype)
    share_ties(cut.model, skeleton.model)
    cut = replace(
        cut, host_embedding=skeleton.host_embedding, packed_head=skeleton.packed_head,
        packed_embedding=skeleton.packed_embedding, kv_layers=skeleton.kv_layers[:depth],
    )  # fmt: skip
    return with_records(cut, skeleton.experts[0].layout.form)


def single_layer(skeleton: Skeleton, layer: int, dtype: torch.dtype) -> Skeleton:
    """The model without weights and with one of its layers alone, one that has experts; otherwise as
    `shallow_skeleton`, whose remark and error hold here too."""
    return _with_layers(skeleton, layer_kinds(skeleton), [layer], dtype)


def _with_layers(
    skeleton: Skeleton, kinds: Sequence[Hashable], layers: Sequence[int], dtype: torch.dtype
) -> Skeleton:
    config = copy.deepcopy(skeleton.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == len(kinds):  # of every layer
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    if layers[0]:  # it is the first one now: which are without experts is said by numbers
        for name, value in _ALL_WITH_EXPERTS.items():
            if hasattr(text, name):
                setattr(text, name, copy.copy(value))
    what = f"{skeleton.config.model_type} with {len(layers)} layers"
    cut = skeleton_from_config(config, dtype, what)
    if layer_kinds(cut) != [kinds[layer] for layer in layers]:
        raise UnsupportedModelError(f"{what} has layers of other kinds.")
    return cut


def shallow_bytes(skeleton: Skeleton) -> int:
    """Device bytes of what `fill_alike` makes, and of the copies in which products are joined."""
    shared = [(name, p.numel() * p.element_size()) for name, p in _shared(skeleton)]
    return max(size for _, size in shared) + sum(size for name, size in shared if _LAYER.match(name))


def fill_alike(skeleton: Skeleton, device: torch.device) -> None:
    """Shared weights on `device`: all matrices are windows of one block of normal(0, 0.02), norms are 1 and
    biases 0, so that modules can be told by what they compute; a packed head has no weights at all."""
    model = skeleton.model
    float32 = float32_names(model)
    shared = _shared(skeleton)
    block = torch.empty(max(p.numel() for _, p in shared), dtype=model.dtype, device=device)
    block.normal_(0.0, SPREAD)
    for name, empty in shared:
        dtype = torch.float32 if float32 is not None and float32.search(name) else empty.dtype
        weight = _weight(name, empty, dtype, block)
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    if skeleton.packed_head is not None:
        PackedHead(skeleton, device, stand_in=True)
    model.tie_weights(recompute_mapping=False)
    rebuild_buffers(model, device)


def _weight(name: str, like: Tensor, dtype: torch.dtype, block: Tensor) -> Tensor:
    if like.dim() > 1:
        return block[: like.numel()].view(like.shape).to(dtype)
    return torch.full(like.shape, float(name.endswith("weight")), dtype=dtype, device=block.device)


def _shared(skeleton: Skeleton) -> list[tuple[str, nn.Parameter]]:
    """All parameters but what lies in the host's memory, the routed experts' weights and maybe the input
    embedding, and but a head that is packed."""
    routed = {key for experts in skeleton.experts for key in experts.weight_keys}
    others = (*routed, skeleton.host_embedding_key, *skeleton.packed_keys)
    return [(name, p) for name, p in skeleton.model.named_parameters() if name not in others]
