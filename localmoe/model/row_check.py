"""Measure, on the model itself, how many rows a pass must be padded to for what a token gives not to depend
on how many tokens ride along. kernels.rows measures single products; this sees every operation but the
routed experts, of one layer of each kind.

Libraries compute a few values otherwise in the middle of many than alone (3 % of the sigmoids of one column),
and later sums round most of that away. So what every module gives is compared, not only where it all ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from localmoe.kernels.attention import KV_BLOCK
from localmoe.kernels.rows import CANDIDATES, RowPadding, measure_row_multiple
from localmoe.model.cached_pass import cached_pass
from localmoe.model.head_widths import head_widths
from localmoe.model.kv_cache import KVCache, stateless_layers
from localmoe.model.shallow import decoder_layers, depth_of_all, layer_kinds
from localmoe.model.skeleton import Skeleton
from localmoe.model.takeover import NAME, take_over

_ALONE = CANDIDATES[-1]  # tokens that are also run one a pass, and the least that the widest pass has to be
_WINDOWS = (9, 5, 2, _ALONE)  # tokens a pass that are compared with those
_WIDEST = 80
_TEXTS = 3  # random ones: what is wrong for few values is not wrong in each
_PREFIX = KV_BLOCK - 7  # the compared tokens straddle a block of the cache
ALIGNMENT = 64  # bytes: of no wider piece of memory may a library's choice of a kernel depend
_PIECE = 4096  # columns that a print is made of at a time
_ODD = 0x1E3779B97F4A7C15
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_Seen = dict[tuple[str, int], Tensor]  # by module and place among what it was given and gave: prints of rows


def measure_row_padding(
    skeleton: Skeleton, device: torch.device, for_experts: RowPadding, *, own_attention: bool = False
) -> RowPadding | None:
    """The smallest row multiple, and the widest pass, for which all that modules give for a token has the
    same bits in all passes tried.

    Leaves the model's experts handed to a stand-in: take over again before use.

    Args:
        for_experts: what holds for the experts' products, which this does not try.
        own_attention: it is not PyTorch's products that compute it, but code for which rows are independent.

    Returns:
        None if no multiple will do.
    """
    # attention multiplies in float32 whatever the model's dtype; heads that share keys are rows of one
    # product
    products: list[Tensor] = []
    for width in () if own_attention else sorted(head_widths(skeleton)):
        keys = torch.randn(
            KV_BLOCK, width, generator=torch.Generator().manual_seed(1), dtype=torch.float32
        ).to(device)
        products += [keys, keys.T.contiguous()]
    # and layers' own products: 16 bits round away most of what the passes below could show
    layers = decoder_layers(skeleton)
    products += [m.weight for layer in getattr(*layers) for m in layer.modules() if _is_product(m)]
    for_products = measure_row_multiple(products, for_experts.max_rows, transposed=False)
    if for_products is None:
        return None
    take_over(skeleton, [_stand_in] * len(skeleton.experts), attention=NAME)
    generator, vocab = torch.Generator().manual_seed(0), int(skeleton.text_config.vocab_size)
    prefix, *texts = (
        torch.randint(0, vocab, (count,), generator=generator).tolist()
        for count in (_PREFIX, *[_WIDEST] * _TEXTS)
    )
    cut, watch = _cut_to_kinds(skeleton), _Watch()
    with torch.inference_mode(), cut as depth, watch.on(skeleton.model):
        stateless = stateless_layers(skeleton.text_config)
        cache = KVCache(depth, _PREFIX + _WIDEST + CANDIDATES[-1], stateless=stateless)
        passes = _Passes(skeleton, cache, device, watch)
        passes.run(prefix, 1)
        for multiple in CANDIDATES:
            if multiple >= max(for_experts.multiple, for_products):
                width = _same_bits_up_to(passes, texts, multiple, for_experts.max_rows)
                if width:
                    return RowPadding(multiple, min(width, for_experts.max_rows))
    return None


def _is_product(module: nn.Module) -> bool:
    """Whether it is a linear layer that PyTorch computes."""
    return type(module) is nn.Linear and "forward" not in vars(module) and not module.weight.is_meta


def _same_bits_up_to(passes: _Passes, texts: Sequence[list[int]], multiple: int, most: int) -> int:
    """The widest pass up to which all give tokens the bits that they get one by one; 0 if narrow ones do not.
    most: wider ones are of no use."""
    few = texts[0][:_ALONE]
    alone = passes.in_windows(few, 1, multiple, head=True)
    if not all(_equal(alone, passes.in_windows(few, window, multiple, head=True)) for window in _WINDOWS):
        return 0
    known = [passes.in_windows(text, _ALONE, multiple, head=text is texts[0]) for text in texts]

    def right(text: int, width: int, head: bool = False) -> bool:
        return _equal(known[text], passes.in_windows(texts[text][:width], width, multiple, head=head))

    widest = min(_WIDEST, -(-most // multiple) * multiple)
    for text in range(len(texts)):  # each with other widths
        for step in range(2 * _ALONE, _WIDEST + 1, _ALONE):
            width = step - text * multiple
            if _ALONE < width <= widest and not right(text, width):
                widest = width - multiple
    while widest > _ALONE and not all(right(text, widest, head=text == 0) for text in range(len(texts))):
        widest -= multiple
    return max(widest, _ALONE)


def _equal(first: _Seen, other: _Seen) -> bool:
    """Whether what both saw of the same tokens, the first ones, is the same."""
    both = first.keys() & other.keys()
    assert both, "no module gives rows"
    for key in both:
        count = min(len(first[key]), len(other[key]))
        if not torch.equal(first[key][:count], other[key][:count]):
            return False
    return True


@contextmanager
def _cut_to_kinds(skeleton: Skeleton) -> Iterator[int]:
    """The first layers alone, as many as are together of every kind, and how many these are. Layers of a kind
    run the same operations on weights that lie alike in memory; all of a large model take some times as
    long."""
    owner, attribute = decoder_layers(skeleton)
    layers: nn.ModuleList = getattr(owner, attribute)
    lie = [tuple(p.data_ptr() % ALIGNMENT for p in layer.parameters()) for layer in layers]
    depth = depth_of_all(skeleton, list(zip(layer_kinds(skeleton), lie, strict=True)))
    setattr(owner, attribute, layers[:depth])
    try:
        yield depth
    finally:
        setattr(owner, attribute, layers)


def _stand_in(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Needs no weights, and lets every bit of the router's output show in what it gives."""
    ranks = torch.arange(1, top_k_index.shape[1] + 1, device=hidden.device)
    mixed = (top_k_weights * ranks).sum(-1) + (top_k_index * ranks).sum(-1) / 1024
    return (hidden * mixed[:, None]).to(hidden.dtype)


class _Passes:
    """Passes of a model over one cache, and the rows of all that its modules are given and give."""

    def __init__(self, skeleton: Skeleton, cache: KVCache, device: torch.device, watch: _Watch) -> None:
        self._model = skeleton.model
        self._cache = cache
        self._device = device
        self._watch = watch

    def in_windows(self, tokens: Sequence[int], window: int, multiple: int, *, head: bool) -> _Seen:
        """Of tokens behind the prefix, so many a pass. head: all have logits, which take long."""
        parts = [
            self.run(tokens[start : start + window], multiple, head=head)
            for start in range(0, len(tokens), window)
        ]
        self._cache.truncate(_PREFIX)
        everywhere = [key for key in parts[0] if all(key in part for part in parts)]
        return {key: torch.cat([part[key] for part in parts]) for key in everywhere}

    def run(self, tokens: Sequence[int], multiple: int, *, head: bool = False) -> _Seen:
        """One pass behind what the cache holds."""
        start, count = self._cache.length, len(tokens)
        padding = -count % multiple
        ids = torch.tensor([[*tokens, *[tokens[-1]] * padding]], device=self._device)
        positions = torch.arange(start, start + count + padding, device=self._device)[None]
        self._watch.begin(count, count + padding)
        cached_pass(self._model, ids, positions, self._cache, keep=0 if head else 1)
        self._cache.truncate(start + count)
        return self._watch.seen


class _Watch:
    """Prints of the first `count` rows of each floating-point tensor of `rows` rows that goes into a module
    of the model or comes out of it in one pass. Its hooks stay for all passes: there are a hundred."""

    def __init__(self) -> None:
        self.begin(0, 0)

    def begin(self, count: int, rows: int) -> None:
        """What is seen from now on is of another pass."""
        self._count, self._rows = count, rows
        self.seen: _Seen = {}
        self._calls: Counter[str] = Counter()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._hook(name)) for name, module in model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], gave: Any) -> None:
            for tensor in (*given, *(gave if isinstance(gave, tuple | list) else (gave,))):
                place = self._calls[name]
                self._calls[name] += 1
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() in (2, 3):
                    height, width = tensor.shape[-2:]
                    if height == self._rows and tensor.numel() == height * width:
                        self.seen[name, place] = _prints(tensor.reshape(height, width)[: self._count])

        return hook


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-(2**62), 2**62, (_PIECE,), generator=generator).to(device) * 2 + 1


def _prints(rows: Tensor) -> Tensor:
    """(T,) int64, equal where rows (T, N) have the same bits, and hardly ever otherwise: sums of their
    columns times random numbers, modulo 2^64. The rows themselves would take as much memory as a layer."""
    factors = _factors(rows.device)
    bits = (rows + 0.0).view(_BITS[rows.element_size()])  # -0 is as good as 0
    first, *others = bits.split(_PIECE, dim=1) if bits.shape[1] > _PIECE else (bits,)
    found = (first * factors[: first.shape[1]]).sum(dim=1)
    for piece in others:
        found = found * _ODD + (piece * factors[: piece.shape[1]]).sum(dim=1)
    return found
