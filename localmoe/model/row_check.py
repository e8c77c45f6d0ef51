"""Measure, on the model itself, how many rows a pass must be padded to for a token's logits not to depend
on how many tokens ride along. kernels.rows measures single products; this sees every operation but the
routed experts, of one layer of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.attention import KV_BLOCK
from localmoe.kernels.rows import CANDIDATES, RowPadding, measure_row_multiple
from localmoe.model.kv_cache import KVCache
from localmoe.model.shallow import decoder_layers, depth_of_all, layer_kinds
from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import NAME, take_over

_WINDOWS = (9, 5, 2)  # tokens a pass that are compared with one token a pass
_WIDTHS = (80, 64, 48, 32, 16)  # how wide a pass may get is tried in this order
_TOKENS = 16
_PREFIX = KV_BLOCK - 7  # the compared tokens straddle a block of the cache
_ALIGNMENT = 64  # bytes: of no wider piece of memory may a library's choice of a kernel depend


def measure_row_padding(
    skeleton: Skeleton, device: torch.device, for_experts: RowPadding
) -> RowPadding | None:
    """The smallest row multiple, and the widest pass, for which a token's logits have the same bits in all
    passes tried.

    Leaves the model's experts handed to a stand-in: take over again before use.

    Args:
        for_experts: what holds for the experts' products, which this does not try.

    Returns:
        None if no multiple will do.
    """
    # attention multiplies in float32 whatever the model's dtype; heads that share keys are rows of one
    # product
    keys = torch.randn(KV_BLOCK, _head_dim(skeleton), generator=torch.Generator().manual_seed(1)).to(device)
    for_attention = measure_row_multiple([keys, keys.T.contiguous()], for_experts.max_rows, transposed=False)
    if for_attention is None:
        return None
    take_over(skeleton, [_stand_in] * len(skeleton.experts), attention=NAME)
    count = _PREFIX + _WIDTHS[0]
    generator = torch.Generator().manual_seed(0)
    vocab = int(skeleton.text_config.vocab_size)
    tokens = torch.randint(0, vocab, (count,), generator=generator).tolist()
    with torch.inference_mode(), _cut_to_kinds(skeleton) as depth:
        cache = KVCache(depth, count + CANDIDATES[-1])
        _run(skeleton.model, cache, tokens[:_PREFIX], 1, device)
        for multiple in CANDIDATES:
            if multiple >= max(for_experts.multiple, for_attention):
                width = _same_bits_up_to(skeleton.model, cache, tokens[_PREFIX:], multiple, device)
                if width:
                    return RowPadding(multiple, min(width, for_experts.max_rows))
    return None


@contextmanager
def _cut_to_kinds(skeleton: Skeleton) -> Iterator[int]:
    """The first layers alone, as many as are together of every kind, and how many these are. Layers of a kind
    run the same operations on weights that lie alike in memory; all of a large model take some times as
    long."""
    owner, attribute = decoder_layers(skeleton)
    layers: nn.ModuleList = getattr(owner, attribute)
    lie = [tuple(p.data_ptr() % _ALIGNMENT for p in layer.parameters()) for layer in layers]
    depth = depth_of_all(skeleton, list(zip(layer_kinds(skeleton), lie, strict=True)))
    setattr(owner, attribute, layers[:depth])
    try:
        yield depth
    finally:
        setattr(owner, attribute, layers)


def _same_bits_up_to(
    model: Any, cache: KVCache, tokens: list[int], multiple: int, device: torch.device
) -> int:
    """The widest pass that gives the first tokens the bits that they get one by one; 0 if narrow ones do
    not."""
    compared = tokens[:_TOKENS]
    alone = _in_windows(model, cache, compared, 1, multiple, device)
    if not all(
        torch.equal(alone, _in_windows(model, cache, compared, w, multiple, device)) for w in _WINDOWS
    ):
        return 0
    for width in _WIDTHS:
        if torch.equal(alone, _in_windows(model, cache, tokens[:width], width, multiple, device)[:_TOKENS]):
            return width
    return 0


def _head_dim(skeleton: Skeleton) -> int:
    text = skeleton.text_config
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _stand_in(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Needs no weights, and lets every bit of the router's output show in the logits."""
    ranks = torch.arange(1, top_k_index.shape[1] + 1, device=hidden.device)
    mixed = (top_k_weights * ranks).sum(-1) + (top_k_index * ranks).sum(-1) / 1024
    return (hidden * mixed[:, None]).to(hidden.dtype)


def _in_windows(
    model: Any, cache: KVCache, tokens: Sequence[int], window: int, multiple: int, device: torch.device
) -> Tensor:
    parts = [
        _run(model, cache, tokens[start : start + window], multiple, device)
        for start in range(0, len(tokens), window)
    ]
    cache.truncate(_PREFIX)
    return torch.cat(parts)


def _run(model: Any, cache: KVCache, tokens: Sequence[int], multiple: int, device: torch.device) -> Tensor:
    start, count = cache.length, len(tokens)
    padding = -count % multiple
    ids = torch.tensor([[*tokens, *[tokens[-1]] * padding]], device=device)
    positions = torch.arange(start, start + count + padding, device=device)[None]
    logits: Tensor = model(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=0
    ).logits[0]
    cache.truncate(start + count)
    return logits[:count]
