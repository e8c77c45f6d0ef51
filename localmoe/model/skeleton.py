"""Build a model from its config with no weights, and find its routed experts. Decides whether it can be
taken over."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from localmoe.core.errors import UnsupportedModelError, sentence_of
from localmoe.experts.records import RecordLayout
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.float8_tensors import is_in_codes
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.building import one_at_a_time
from localmoe.model.config_limits import refuse_long_lists
from localmoe.model.expert_module import weight_names
from localmoe.model.kv_cache import KVLayerShape, stateless_layers
from localmoe.model.own_code import needs_own_code
from localmoe.model.text_part import keep_text_part, language_model_class, writes_tokens
from localmoe.model.tying import settle_ties
from localmoe.quant.mxfp4 import is_packed

RECURRENT_LAYER_TYPES = {
    "linear_attention",
    "mamba",
    "mamba2",
    "conv",
    "recurrent",
    "hybrid",
    "sliding_recurrent",
}
KEYS_AND_VALUES = DynamicLayer, DynamicSlidingWindowLayer  # of layers that keep nothing else
_LAYER_INDEX = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """The fused experts of one MoE layer: module path, index of its decoder layer, the module and its
    record layout."""

    path: str
    decoder_layer: int
    module: nn.Module
    layout: RecordLayout

    @property
    def weight_keys(self) -> tuple[str, str]:
        """Names of its two weights among the model's parameters."""
        first, down = weight_names(self.module)
        return f"{self.path}.{first}", f"{self.path}.{down}"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A transformers model on the meta device. host_embedding: path of the input embedding, if its table is
    to lie in the host's memory (model.host_embedding). packed_head: path of the output head, if its weight is
    to be packed (model.packed_head). packed_embedding: path of an input embedding that is the same weight.
    kv_layers: what decoder layers cache, where steps are to run whole on a GPU (model.kv_trial)."""

    model: Any  # a PreTrainedModel
    config: Any
    experts: tuple[ExpertsModule, ...]
    num_experts: int
    experts_per_token: int
    can_rollback: bool
    host_embedding: str | None = None
    packed_head: str | None = None
    packed_embedding: str | None = None
    kv_layers: tuple[KVLayerShape, ...] = ()

    @property
    def text_config(self) -> Any:
        """The part of the config that describes the language model."""
        return self.config.get_text_config()

    @property
    def host_embedding_key(self) -> str | None:
        """Name of that table among the model's parameters."""
        return None if self.host_embedding is None else f"{self.host_embedding}.weight"

    @property
    def packed_keys(self) -> frozenset[str]:
        """Names that such a weight has among the model's parameters, where it stays without memory."""
        paths = (self.packed_head, self.packed_embedding)
        return frozenset(f"{path}.weight" for path in paths if path is not None)


def embedding_shape(skeleton: Skeleton) -> tuple[int, int] | None:
    """(V, H) of the table that is to lie in the host's memory; None if there is none."""
    if skeleton.host_embedding is None:
        return None
    module = skeleton.model.get_submodule(skeleton.host_embedding)
    return module.num_embeddings, module.embedding_dim


def with_records(skeleton: Skeleton, form: WeightForm) -> Skeleton:
    """The same, its experts kept in a form."""
    layouts = [replace(experts.layout, form=form) for experts in skeleton.experts]
    pairs = zip(skeleton.experts, layouts, strict=True)
    return replace(skeleton, experts=tuple(replace(experts, layout=layout) for experts, layout in pairs))


def build_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> Skeleton:
    """Instantiate the checkpoint's architecture without weights.

    Raises:
        UnsupportedModelError: unknown architecture, custom code, quantised weights, a dense model, or
            experts of a form that the takeover does not know.
        CheckpointError: weights that the config calls one are stored twice, and cannot be compared.
    """
    what = f"the model in {checkpoint.folder}"
    skeleton = skeleton_from_config(read_model_config(checkpoint), dtype, what)
    settle_ties(skeleton.model, checkpoint)
    return skeleton


def read_model_config(checkpoint: Checkpoint) -> Any:
    """The checkpoint's config as transformers understands it.

    Raises:
        UnsupportedModelError: unknown architecture, custom code, or quantised weights.
    """
    _refuse_by_config(checkpoint)
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # a config may make any line of any architecture fail
        raise _cannot_build(f"the model in {checkpoint.folder}", error) from error
    if "quantization_config" in checkpoint.config:  # another file's, or in brief
        config.quantization_config = checkpoint.config["quantization_config"]
    return config


def model_from_config(config: Any, dtype: torch.dtype, what: str) -> Any:
    """A language model without weights and without parts that text does not need. `what` names it in errors.

    Raises:
        UnsupportedModelError: transformers cannot build it, or it does not write one token after another.
    """
    try:
        with one_at_a_time(), torch.device("meta"):
            kind = language_model_class(config)
            model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        if writes_tokens(model):
            keep_text_part(model)
    except Exception as error:  # a config may make any line of any architecture fail
        raise _cannot_build(what, error) from error
    if not writes_tokens(model):
        raise UnsupportedModelError(
            f"{_capitalised(what)} ({config.model_type}) does not write text as one model, one token after "
            "another: this form is not supported."
        )
    return model.eval()


def skeleton_from_config(config: Any, dtype: torch.dtype, what: str) -> Skeleton:
    """Instantiate a transformers config without weights. `what` names the model in errors.

    Raises:
        UnsupportedModelError: transformers cannot build it, it is a dense model, or its experts are of a
            form that the takeover does not know.
    """
    model = model_from_config(config, dtype, what)
    experts = _find_experts(model)
    text = config.get_text_config()
    if not experts:
        raise UnsupportedModelError(
            f"{_capitalised(what)} ({config.model_type}) has no routed experts that localmoe can "
            "take over: it is a dense model or a Mixture-of-Experts of an unsupported form."
        )
    if any(hasattr(layer, "set_prefill_length") for layer in cached_layers(text).values()):
        raise UnsupportedModelError(
            f"{_capitalised(what)} ({config.model_type}) keeps what it reads in another way than what it "
            "writes: this form is not supported."
        )
    return Skeleton(
        model=model,
        config=config,
        experts=experts,
        num_experts=int(str(experts[0].module.num_experts)),
        experts_per_token=_experts_per_token(text, int(str(experts[0].module.num_experts))),
        can_rollback=can_roll_back(text),
    )


def _capitalised(what: str) -> str:
    return f"{what[:1].upper()}{what[1:]}"


def _cannot_build(what: str, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"transformers cannot build {what}: {sentence_of(error)}")


def _refuse_by_config(checkpoint: Checkpoint) -> None:
    quantization = checkpoint.config.get("quantization_config")
    if quantization and not is_packed(checkpoint.config) and not is_in_codes(checkpoint.config):
        said = {"quant_method": "unknown", **(quantization if isinstance(quantization, dict) else {})}
        said.setdefault("expert_dtype", checkpoint.config.get("expert_dtype"))
        kinds = ("quant_method", "quant_algo", "format", "fmt", "expert_dtype")
        how = ", ".join(str(said[kind])[:40] for kind in kinds if said.get(kind))
        raise UnsupportedModelError(
            f"The weights in {checkpoint.folder} are quantised ({how}): localmoe needs the original "
            "weights, of 16 bits or in FP8, NVFP4, MXFP4 or INT4, as the target and makes its own INT4 draft."
        )
    if needs_own_code(checkpoint.config):
        raise UnsupportedModelError(
            f"The model in {checkpoint.folder} needs Python code of its own, which localmoe never runs: "
            "choose a model that transformers supports itself."
        )
    refuse_long_lists(checkpoint.config, checkpoint.folder)


def _find_experts(model: nn.Module) -> tuple[ExpertsModule, ...]:
    found: list[ExpertsModule] = []
    for path, module in model.named_modules():
        if not (hasattr(module, "is_transposed") and hasattr(module, "is_concatenated")):
            continue
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(
                f"The experts of {type(module).__name__} have a norm of their own: this form is not "
                "supported."
            )
        first, down = (getattr(module, name) for name in weight_names(module))
        if not (first.numel() and down.numel()):  # records have a size
            raise UnsupportedModelError(
                f"The config of this model gives its experts weights of shape {list(first.shape)} and "
                f"{list(down.shape)}, which are none: it is damaged, so download the model again."
            )
        layout = RecordLayout(tuple(first.shape[1:]), tuple(down.shape[1:]), bool(module.is_transposed))
        match = _LAYER_INDEX.search(path)
        assert match is not None, f"experts outside a layer: {path}"
        if found and found[-1].decoder_layer == int(match.group(1)):
            raise UnsupportedModelError(
                f"The layers of {type(model).__name__} have experts of several kinds: this form is not "
                "supported."
            )
        found.append(ExpertsModule(path, int(match.group(1)), module, layout))
    return tuple(found)


def _experts_per_token(text_config: Any, num_experts: int) -> int:
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"):
        value = getattr(text_config, name, None)
        if isinstance(value, list) and len(set(value)) == 1:  # of each layer
            value = value[0]
        if isinstance(value, int):
            if not 1 <= value <= num_experts:
                raise UnsupportedModelError(
                    f"The config of this {text_config.model_type} model says that a token uses {value} of "
                    f"{num_experts} experts ({name}): it is damaged, so download the model again."
                )
            return value
    raise UnsupportedModelError(
        f"The config of this {text_config.model_type} model does not say how many experts a token uses in "
        "all layers alike."
    )


def layer_types(text_config: Any) -> list[str]:
    """Of each decoder layer, where the config says so."""
    return list(
        getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or ()
    )


def cached_layers(text_config: Any) -> dict[int, Any]:
    """What transformers would keep of each decoder layer between passes, by its index, without those that
    keep nothing.

    Raises:
        UnsupportedModelError: it cannot make that of this config.
    """
    stateless = stateless_layers(text_config)
    try:
        layers = transformers.DynamicCache(config=text_config).layers
    except Exception as error:  # any value of any config
        raise _cannot_build(f"the cache of this {text_config.model_type} model", error) from error
    return {index: layer for index, layer in enumerate(layers) if index not in stateless}


def can_roll_back(text_config: Any) -> bool:
    """Whether the whole state is keys and values. Recurrent state cannot drop its last tokens, and what is
    kept beside keys and values, such as an index of them, has no place in model.kv_cache."""
    if keeps_recurrent_state(text_config):
        return False
    return all(type(layer) in KEYS_AND_VALUES for layer in cached_layers(text_config).values())


def keeps_recurrent_state(text_config: Any) -> bool:
    """Whether some layers do, as the config names them."""
    return bool(set(layer_types(text_config)) & RECURRENT_LAYER_TYPES)
