"""Decoder layers of a transformers model on the GPU: the sum behind attention in one kernel with the norm
that follows it, and a shared expert beside the routed ones. Known by what their forward names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from localmoe.kernels.gpu.add import add
from localmoe.model.device_shared_experts import forward_names
from localmoe.model.side_stream import SideStream, beside

_SCALE = "residual_multiplier"  # of what is added, where a layer has one


@dataclass(frozen=True, slots=True)
class _Form:
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    Attributes:
        mixers: what they are called; a layer has one of them.
        mlp: likewise; a second one is added to the first.
        norms: likewise.
        others: what else a forward names, in one way or another.
    """

    mixers: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    others: tuple[frozenset[str], ...] = (frozenset(),)

    def fits(self, names: set[str]) -> bool:
        known = {*self.mixers, *self.mlp, *self.norms}
        return any(names == known | others for others in self.others)


_MIXED = frozenset({"isinstance", "tuple"})
_CONV = frozenset({"is_attention_layer"})
_FORMS = (
    _Form(("self_attn",), ("mlp",), others=(frozenset(), frozenset({"block_type"}))),
    _Form(("linear_attn", "self_attn"), ("mlp",), others=(_MIXED | {"block_type"}, _MIXED | {"layer_type"})),
    _Form(
        ("conv", "self_attn"), ("feed_forward",), ("operator_norm", "ffn_norm"), (_CONV, _CONV | {"get"})
    ),
    _Form(("self_attn",), ("block_sparse_moe",), others=(frozenset({_SCALE}),)),
    _Form(("self_attn",), ("block_sparse_moe", "shared_mlp"), others=(frozenset({_SCALE}),)),
    _Form(
        ("mamba", "self_attn"), ("block_sparse_moe", "shared_mlp"),
        others=(frozenset({_SCALE, "has_experts"}),),
    ),
)  # fmt: skip


def fuse_decoder_layer(module: nn.Module, side: SideStream) -> None:
    """Do so if the module is one, and its second norm has a kernel."""
    names = forward_names(module)
    form = next((form for form in _FORMS if form.fits(names)), None)
    if form is not None and hasattr(getattr(module, form.norms[1]), "localmoe_norm"):
        (mixer,) = _parts(module, form.mixers)
        parameters = inspect.signature(mixer.forward).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        module.forward = partial(_forward, module, form, side, None if open_ended else set(parameters))


def _forward(
    layer: Any,
    form: _Form,
    side: SideStream,
    taken: set[str] | None,
    hidden_states: Tensor,
    attention_mask: Any = None,
    **for_mixer: Any,
) -> Tensor:
    scale = float(getattr(layer, _SCALE, 1.0))
    normed = getattr(layer, form.norms[0])(hidden_states)
    (mixer,) = _parts(layer, form.mixers)
    if taken is not None:  # a mixer of another kind than attention may know less
        for_mixer = {name: value for name, value in for_mixer.items() if name in taken}
    mixed = _first(mixer(hidden_states=normed, attention_mask=attention_mask, **for_mixer))
    normed, residual = getattr(layer, form.norms[1]).localmoe_norm(mixed, hidden_states, scale=scale)
    return add(residual, _run(_parts(layer, form.mlp), normed, side), scale=scale)


def _parts(layer: Any, names: tuple[str, ...]) -> list[Any]:
    return [part for name in names if (part := getattr(layer, name, None)) is not None]


def _run(mlps: list[Any], x: Tensor, side: SideStream) -> Tensor:
    routed, *shared = mlps
    if not shared:
        alone: Tensor = _first(routed(x)).contiguous()
        return alone
    with beside(side, x.numel() // x.shape[-1]):
        other = shared[0](x)
    found = _first(routed(x)).contiguous()
    side.join()
    return add(found, other.contiguous())


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out
