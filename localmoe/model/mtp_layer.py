"""The layer that a model was trained with to predict one token more (multi-token prediction, MTP), run as a
transformers model of that one layer: from a hidden state of the model and the embedding of the token after it
to the hidden state of the next. Keeps no text; reads no weights.

DeepSeek-V3 (arXiv 2412.19437), section 2.2, equations 21 to 23. Embedding and
output head are the model's own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from localmoe.core.errors import UnsupportedModelError
from localmoe.hub.mtp_tensors import MtpPaths
from localmoe.model.cached_pass import cache_name
from localmoe.model.draft_experts import LowBitLayer
from localmoe.model.kv_trial import kv_elements_per_token
from localmoe.model.shallow import decoder_layers, single_layer
from localmoe.model.skeleton import RECURRENT_LAYER_TYPES, Skeleton, layer_types
from localmoe.model.tying import untie
from localmoe.model.uninstall import uninstall

_FUSION = "localmoe_mtp"


class Fusion(nn.Module):
    """What comes before the decoder layer. Norms are of the model's own kind; weights have no memory yet."""

    def __init__(self, norm: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, dtype=dtype, device="meta")

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """(..., H), (..., H) -> (..., H)."""
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return joined


@dataclass(frozen=True, slots=True)
class MtpSkeleton:
    """The layer without weights: a model of one layer that has neither an embedding nor a head.

    Attributes:
        kv_elements_per_token: what it caches.
    """

    skeleton: Skeleton
    paths: MtpPaths
    kv_elements_per_token: int

    @property
    def shared_params(self) -> int:
        """All weights but the routed experts'."""
        (experts,) = self.skeleton.experts
        routed = self.skeleton.num_experts * experts.layout.elements
        return sum(int(p.numel()) for p in self.skeleton.model.parameters()) - routed

    @property
    def buffer_bytes(self) -> int:
        """Of what is no parameter, such as rotary frequencies."""
        return sum(int(b.numel() * b.element_size()) for b in self.skeleton.model.buffers())


def mtp_skeleton(skeleton: Skeleton, dtype: torch.dtype) -> MtpSkeleton:
    """The layer as it has to be for a model of this architecture: like the last one with experts that attends
    to tokens. Call it where nothing else builds models, see shallow.

    Raises:
        UnsupportedModelError: there is no such layer, or alone it would be another.
    """
    types = layer_types(skeleton.text_config)
    attending = [
        experts.decoder_layer
        for experts in skeleton.experts
        if not types or types[experts.decoder_layer] not in RECURRENT_LAYER_TYPES
    ]
    if not attending:
        raise UnsupportedModelError(f"No layer of {skeleton.config.model_type} attends to tokens.")
    cut = single_layer(skeleton, attending[-1], dtype)
    if not cut.can_rollback:
        raise UnsupportedModelError(
            f"A layer of {skeleton.config.model_type} keeps more than keys and values, which cannot drop a "
            "rejected draft."
        )
    elements = kv_elements_per_token(cut.model, can_rollback=True)
    owner, attribute = decoder_layers(cut)
    path = next(name for name, module in cut.model.named_modules() if module is owner)
    norm = _final_norm(owner, cut.config.model_type)
    untie(cut.model)
    # which take no memory, and are the model's own
    cut.model.set_input_embeddings(nn.Identity())
    cut.model.set_output_embeddings(nn.Identity())
    fusion = Fusion(owner.get_submodule(norm), int(cut.text_config.hidden_size), dtype)
    cut.model.add_module(_FUSION, fusion.eval())
    prefix = f"{path}." if path else ""
    paths = MtpPaths(_FUSION, f"{prefix}{attribute}.0", f"{prefix}{norm}")
    return MtpSkeleton(cut, paths, elements)


def _final_norm(owner: nn.Module, architecture: str) -> str:
    """What the module that runs the layers calls the norm behind them."""
    norms = [name for name, child in owner.named_children() if "norm" in type(child).__name__.lower()]
    if len(norms) != 1:
        raise UnsupportedModelError(f"{architecture} has {len(norms)} norms behind its layers, not one.")
    return norms[0]


class MtpLayer:
    """The layer with its weights, and its experts in low bits."""

    def __init__(self, made: MtpSkeleton, experts: LowBitLayer) -> None:
        """experts: take the place of the skeleton's, once it is taken over."""
        self.made = made
        self.model = made.skeleton.model
        self.text_config = made.skeleton.text_config
        self.experts = experts
        self._fusion = self.model.get_submodule(_FUSION)
        self._decoder: Any = self.model.get_decoder()
        self._cache_name = cache_name(type(self._decoder).forward)

    @property
    def num_bytes(self) -> int:
        """Device bytes of its weights."""
        held = [t for t in (*self.model.parameters(), *self.model.buffers()) if not t.is_meta]
        return self.experts.num_bytes + sum(int(t.numel() * t.element_size()) for t in held)

    def release(self) -> None:
        """Give the memory of its weights back."""
        uninstall(self.model)
        self.model.to("meta")
        self.experts.release()

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Append T tokens to the cache; what lies before the output head for each.

        Args:
            embedded: (T, H), of each token.
            hidden: (T, H), what lay before the head for the token before it.
            positions: int64 (T,), of the tokens.

        Returns:
            (T, H).
        """
        out = self._decoder(
            inputs_embeds=self._fusion(embedded, hidden)[None], position_ids=positions[None], use_cache=True,
            **{self._cache_name: cache},
        )  # fmt: skip
        rows: Tensor = out.last_hidden_state[0]
        return rows
