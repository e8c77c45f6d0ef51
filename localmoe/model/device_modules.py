"""Give a transformers model fused GPU kernels for what lies around its experts: norms, routers, gated MLPs,
rotary embedding, residual sums. A module is replaced only if the kernel computes what the module itself
computes on a trial, decoder layers and gated shared experts by what their forward names; whatever is not
recognised keeps its own code. Knows no architecture by name.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu.add import add
from localmoe.kernels.gpu.linear import gemv_gated, linear_gated
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.rope import apply_rope
from localmoe.kernels.gpu.router import MOST_CHOSEN, MOST_EXPERTS, route
from localmoe.model.device_linear import KERNEL_DTYPES, KernelMode, join_rows
from localmoe.model.device_shared_experts import (
    SharedBeside,
    forward_names,
    has_gated_shared_expert,
    has_plain_shared_experts,
    shared_expert_forward,
)
from localmoe.model.side_stream import SideStream

_SAME = 2e-2  # relative error of two roundings to 16 bits
_DECODER_NAMES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_SILU = Activation("silu")
_TRIAL_ROWS = 5


def install(model: Any, context: int) -> KernelMode:
    """Replace what is recognised; returns the mode in which the model has to run.

    Args:
        model: with its shared weights on the device, in 16 bits.
        context: positions that the rotary embedding is tabulated for.
    """
    mode = KernelMode()
    side = SideStream(next(model.parameters()).device)
    for module in list(model.modules()):
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _replace_norm(module)
        elif name.endswith("RotaryEmbedding"):
            _tabulate_rotary(module, context, model.dtype)
        elif "Router" in name:
            _replace_router(module)
        if all(isinstance(getattr(module, part, None), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
            linears = [module.q_proj, module.k_proj, module.v_proj]
            if len({linear.bias is None for linear in linears}) == 1:
                mode.fuse(linears)
            _replace_rope(module)
        if _is_gated_mlp(module):
            _replace_mlp(module, mode)
        if has_gated_shared_expert(module):
            module.forward = partial(shared_expert_forward, module, side)
    for module in list(model.modules()):  # once the norms and the shared experts have their kernels
        if has_plain_shared_experts(module):
            SharedBeside(module, side)
        if forward_names(module) == _DECODER_NAMES and _has_kernel(module.post_attention_layernorm):
            module.forward = partial(_decoder_forward, module)
    return mode


def _close(got: Tensor, wanted: Tensor) -> bool:
    got, wanted = got.float(), wanted.float()
    return got.shape == wanted.shape and bool((got - wanted).norm() <= _SAME * wanted.norm())


def _trial(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)


# -- norms


def _replace_norm(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or weight.dim() != 1 or weight.is_meta:
        return
    x = _trial((_TRIAL_ROWS, weight.shape[0]), weight)
    wanted = module(x)
    for offset in (0.0, 1.0):
        kernel = partial(_norm, weight=weight, eps=float(eps), offset=offset)
        if wanted.dtype == x.dtype and _close(kernel(x), wanted):
            module.localmoe_norm = kernel  # type: ignore[assignment]
            module.forward = kernel
            return


def _norm(x: Tensor, residual: Tensor | None = None, *, weight: Tensor, eps: float, offset: float) -> Any:
    return rms_norm(x, weight, eps, residual, weight_offset=offset)


def _has_kernel(norm: nn.Module) -> bool:
    return hasattr(norm, "localmoe_norm")


def _decoder_forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)), the first sum in one kernel with the norm after it."""
    attended, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    normed, residual = layer.post_attention_layernorm.localmoe_norm(attended, hidden_states)
    out = layer.mlp(normed)
    return add(residual, (out[0] if isinstance(out, tuple) else out).contiguous())


# -- rotary embedding


def _tabulate_rotary(module: nn.Module, context: int, dtype: torch.dtype) -> None:
    """Angles of all positions once. An embedding that depends on the length of the text so becomes that of
    the engine's context, for every token alike."""
    on_host = copy.deepcopy(module).cpu()  # as of routers
    tables: dict[tuple[Any, ...], Any] = {}

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        key = (x.device, *args, *sorted(kwargs.items()))
        if key not in tables:
            found = on_host(torch.empty(0, dtype=dtype), torch.arange(context)[None], *args, **kwargs)
            parts = found if isinstance(found, tuple) else (found,)
            parts = tuple(part.to(x.device) for part in parts)
            tables[key] = parts if isinstance(found, tuple) else parts[0]
        found = tables[key]
        if isinstance(found, tuple):
            return tuple(part.index_select(1, position_ids[0]) for part in found)
        return found.index_select(1, position_ids[0])

    module.forward = forward


def _replace_rope(module: Any) -> None:
    """Let the attention module's forward find the kernel where it looks up `apply_rotary_pos_emb`."""
    function = type(module).forward
    original = getattr(function, "__globals__", {}).get("apply_rotary_pos_emb")
    code = getattr(function, "__code__", None)
    if original is None or code is None or code.co_freevars or "apply_rotary_pos_emb" not in code.co_names:
        return
    head_dim = int(module.head_dim)
    weight = module.q_proj.weight
    q, k = _trial((1, 3, _TRIAL_ROWS, head_dim), weight), _trial((1, 2, _TRIAL_ROWS, head_dim), weight)
    cos, sin = _trial((1, _TRIAL_ROWS, head_dim), weight), _trial((1, _TRIAL_ROWS, head_dim), weight)
    try:
        wanted = original(q, k, cos, sin)
    except (RuntimeError, TypeError):  # a rotation of another form, e.g. of part of a head
        return
    if all(_close(a, b) for a, b in zip(apply_rope(q, k, cos, sin), wanted, strict=True)):
        found = {**function.__globals__, "apply_rotary_pos_emb": _rope}
        changed = types.FunctionType(
            code, found, function.__name__, function.__defaults__, function.__closure__
        )
        changed.__kwdefaults__ = function.__kwdefaults__
        module.forward = types.MethodType(changed, module)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    assert unsqueeze_dim == 1, "heads come before tokens"
    return apply_rope(q, k, cos, sin)


# -- routers


def _replace_router(module: Any) -> None:
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if weight is None or not isinstance(top_k, int) or weight.dim() != 2 or weight.is_meta:
        return
    if weight.dtype not in KERNEL_DTYPES or top_k > MOST_CHOSEN or weight.shape[0] > MOST_EXPERTS:
        return
    x = _trial((64, weight.shape[1]), weight)
    try:
        # on the CPU: the first product of every thread that uses PyTorch's library would take 32 MiB for good
        found = copy.deepcopy(module).cpu()(x.cpu())
        wanted = tuple(part.to(x.device) for part in found)
        if len(wanted) != 3 or wanted[2].shape != (64, top_k) or wanted[1].shape != (64, top_k):
            return
    except (RuntimeError, TypeError, ValueError):
        return
    for kernel in _router_candidates(module, weight, top_k, wanted):
        logits, weights, index = kernel(x)
        if _same_routing(weights, index, wanted[1], wanted[2]) and _close(logits, wanted[0]):
            module.forward = kernel
            return


def _router_candidates(
    module: Any, weight: Tensor, top_k: int, wanted: tuple[Tensor, Tensor, Tensor]
) -> Iterator[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    bias = getattr(module, "bias", None)
    scale = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)
    for score in ("softmax", "softmax_after_topk", "sigmoid"):
        for renormalise in (False, True):
            yield partial(
                _route,
                weight=weight,
                top_k=top_k,
                score=score,
                renormalise=renormalise,
                bias=bias,
                scale=scale,
                dtypes=(wanted[0].dtype, wanted[1].dtype),
            )


def _route(
    x: Tensor,
    *,
    weight: Tensor,
    top_k: int,
    score: Any,
    renormalise: bool,
    bias: Tensor | None,
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, index), as transformers' routers return them."""
    weights, index, logits = route(
        x.reshape(-1, x.shape[-1]),
        weight,
        top_k,
        score=score,
        renormalise=renormalise,
        bias=bias,
        out_dtype=dtypes[1],
        logits_dtype=dtypes[0],
    )
    return logits, weights if scale == 1.0 else weights * scale, index


def _same_routing(weights: Tensor, index: Tensor, wanted_weights: Tensor, wanted_index: Tensor) -> bool:
    """The same experts (but for near-ties in a few rows) with the same weights."""
    mine, order = index.sort(dim=-1)
    theirs, wanted_order = wanted_index.sort(dim=-1)
    same = (mine == theirs).all(dim=-1)
    if float(same.float().mean()) < 0.9:
        return False
    return _close(weights.gather(1, order)[same], wanted_weights.gather(1, wanted_order)[same])


# -- gated MLPs


def _is_gated_mlp(module: Any) -> bool:
    if forward_names(module) != _MLP_NAMES or not isinstance(module.act_fn, nn.Module):
        return False
    parts = (module.gate_proj, module.up_proj, module.down_proj)
    if not all(isinstance(part, nn.Linear) for part in parts) or module.gate_proj.bias is not None:
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(module.act_fn(x), nn.functional.silu(x), atol=1e-6))


def _replace_mlp(module: Any, mode: KernelMode) -> None:
    weight = join_rows([module.gate_proj.weight, module.up_proj.weight])

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        run = gemv_gated if mode.one_row and rows.shape[0] == 1 else linear_gated
        out: Tensor = module.down_proj(run(rows, weight, activation=_SILU))
        return out.view(*x.shape[:-1], out.shape[-1])

    module.forward = forward
