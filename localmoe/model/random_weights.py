"""Fill a skeleton with random weights in place of a checkpoint: shared weights on the device, expert records
in host RAM, an INT4 draft. Decides no shapes; the draft is not that of the weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from localmoe.core.errors import LoadCancelledError
from localmoe.core.types import ExpertKey, Progress, ProgressCallback
from localmoe.experts.host_store import HostStore
from localmoe.experts.records import RecordLayout
from localmoe.kernels.codes import CodeMatrix
from localmoe.kernels.int4_tiles import MIDDLE, ZERO_BITS
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_linear import LowBitLinear
from localmoe.model.draft_experts import DraftExpert
from localmoe.model.materialise import float32_names, rebuild_buffers
from localmoe.model.packed_draft import empty_layer
from localmoe.model.packed_head import PackedHead
from localmoe.model.skeleton import ExpertsModule, Skeleton

STORED_DTYPE = torch.bfloat16
SPREAD = 0.02  # standard deviation of all random weights
_SHIFT_BYTES = 128  # between the beginnings of two experts in the random block: a cache line and more
_MAX_THREADS = 16
_HEAD_ROWS = 4096  # of a packed head that are drawn at once
_DRAWN_EXPERTS, _DRAWN_BYTES = 8, 512 << 20  # that are drawn at most, but two of any size
_NVFP4_SCALE = 0x70  # 128
_NVFP4_SPREAD = 128 * 8.5625**0.5  # of codes with it, each alike likely
_FP8_SPREAD = 100.0  # of codes: most of a block are far from its largest one, which is 448
_MXFP4_SCALE = 120  # 2^-7, with which random codes of MXFP4 spread about as much as other weights
_INT4_SPREAD = 21.25**0.5  # standard deviation of the codes -8 to 7, each alike likely
# a scale, whose least bits are a zero point in the middle
_INT4_WORD = int(torch.tensor(SPREAD / _INT4_SPREAD).view(torch.int32)) & ~ZERO_BITS | MIDDLE


def fill_random(
    skeleton: Skeleton,
    device: torch.device,
    store: HostStore,
    seed: int,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Shared weights: matrices normal(0, 0.02), norms 1, biases 0, drawn on `device`. Experts: all are
    windows of one normal(0, 0.02) block at places of their own, so filling costs a copy; in MXFP4 their codes
    are, each alike likely; packed, an expert is one of a few that are drawn, its strips in an order of its
    own.

    Raises:
        LoadCancelledError: `cancel` was set.
    """
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        _fill_shared(skeleton, device, store, generator)
    rebuild_buffers(skeleton.model, device)
    _fill_records(store, device, generator, progress, cancel)


def _fill_shared(
    skeleton: Skeleton, device: torch.device, store: HostStore, generator: torch.Generator
) -> None:
    experts = {key for experts in skeleton.experts for key in experts.weight_keys}
    model = skeleton.model
    float32 = float32_names(model)
    for name, empty in list(model.named_parameters()):
        if name in skeleton.packed_keys:
            _fill_head(PackedHead(skeleton, device), device, generator)
        elif name not in experts:
            dtype = torch.float32 if float32 is not None and float32.search(name) else empty.dtype
            weight = _random_weight(name, empty, device, dtype, generator)
            if name == skeleton.host_embedding_key:
                assert store.embedding is not None, "it was to lie there"
                weight = store.embedding.copy_(weight)
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    model.tie_weights(recompute_mapping=False)


def _fill_head(head: PackedHead, device: torch.device, generator: torch.Generator) -> None:
    """Some rows at a time, so that a device never holds it in 16 bits."""
    for first in range(0, head.rows, _HEAD_ROWS):
        count = min(_HEAD_ROWS, head.rows - first)
        weights = torch.empty(count, head.columns, dtype=STORED_DTYPE, device=device)
        head.put(first, weights.normal_(0.0, SPREAD, generator=generator).cpu())


def _random_weight(
    name: str, like: Tensor, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    out = torch.empty(like.shape, dtype=dtype, device=device)
    if name.endswith("bias") or (like.dim() == 1 and not name.endswith("weight")):
        return out.zero_()
    return out.fill_(1.0) if like.dim() == 1 else out.normal_(0.0, SPREAD, generator=generator)


def _fill_records(
    store: HostStore,
    device: torch.device,
    generator: torch.Generator,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> None:
    assert store.dtype == STORED_DTYPE, "a record of weights begins after a whole number of them"
    if store.layouts[0].bf12:
        _fill_packed(store, generator, progress, cancel)
        return
    shifts = store.num_layers * store.num_experts * _SHIFT_BYTES // store.word.itemsize
    block = torch.empty(store.largest_record + shifts, dtype=store.word, device=device)
    if store.layouts[0].fp8:
        block = _fp8_codes(block, generator)
    elif store.word == torch.uint8:
        block.random_(0, 256, generator=generator)
    else:
        block.normal_(0.0, SPREAD, generator=generator)
    content = block.cpu().view(torch.uint8).numpy()

    def fill(layer: int, expert: int) -> None:
        key = ExpertKey(layer, expert)
        record = store.record(key).view(torch.uint8).numpy()
        start = (layer * store.num_experts + expert) * _SHIFT_BYTES
        # without the GIL, so the threads share the first touch of the pages
        np.copyto(record, content[start : start + len(record)])
        if store.layouts[layer].mxfp4:
            for matrix in store.mxfp4_views(key):
                matrix.scales.fill_(_MXFP4_SCALE)
        if store.layouts[layer].fp8:
            for part in store.fp8_views(key):
                part.scales.fill_(SPREAD / _FP8_SPREAD)
        if store.layouts[layer].nvfp4:
            for four in store.nvfp4_views(key):
                four.scales.fill_(_NVFP4_SCALE)
                four.factors.fill_(SPREAD / _NVFP4_SPREAD)
        if store.layouts[layer].span:
            for integers in store.int4_views(key):
                integers.words.fill_(_INT4_WORD)

    _fill_all(store, fill, progress, cancel)


def _fp8_codes(like: Tensor, generator: torch.Generator) -> Tensor:
    """Of a normal distribution."""
    numbers = torch.empty(like.shape, dtype=STORED_DTYPE, device=like.device)
    numbers.normal_(0.0, _FP8_SPREAD, generator=generator)
    return numbers.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _fill_packed(
    store: HostStore,
    generator: torch.Generator,
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> None:
    """Layers may differ in shape, so each shape has drawn experts of its own."""
    drawn: dict[RecordLayout, list[Tensor]] = {}
    for layout in dict.fromkeys(store.layouts):
        drawn[layout] = []
        for _ in range(max(2, min(_DRAWN_EXPERTS, _DRAWN_BYTES // layout.bf12_bytes))):
            _check(cancel)
            drawn[layout].append(_drawn_record(layout, generator))

    def fill(layer: int, expert: int) -> None:
        layout, number = store.layouts[layer], layer * store.num_experts + expert
        turn, which = divmod(number, len(drawn[layout]))
        record, source = store.record(ExpertKey(layer, expert)), drawn[layout][which]
        for to, matrix in zip(layout.bf12_views(record), layout.bf12_views(source), strict=True):
            strips = len(matrix.codes)
            for parts in zip(to.by_strip, matrix.by_strip, strict=True):
                new, old = (part.numpy() for part in parts)
                at = turn % strips
                # without the GIL, so the threads share the first touch of the pages
                np.copyto(new[: strips - at], old[at:])
                np.copyto(new[strips - at :], old[:at])

    _fill_all(store, fill, progress, cancel)


def _check(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise LoadCancelledError("Loading the model was cancelled.")


def _drawn_record(layout: RecordLayout, generator: torch.Generator) -> Tensor:
    record = torch.zeros(layout.bf12_bytes, dtype=torch.uint8)
    for matrix in layout.bf12_views(record):
        weights = torch.empty(matrix.rows, matrix.columns, dtype=STORED_DTYPE, device=generator.device)
        matrix.put(0, weights.normal_(0.0, SPREAD, generator=generator).cpu())
    return record


def _fill_all(
    store: HostStore,
    fill: Callable[[int, int], None],
    progress: ProgressCallback | None,
    cancel: threading.Event | None,
) -> None:
    """fill(layer, expert) for all, by several threads."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        for layer in range(store.num_layers):
            _check(cancel)
            for _ in threads.map(fill, [layer] * store.num_experts, range(store.num_experts)):
                pass
            if progress is not None:
                progress(Progress("Filling synthetic weights", layer + 1, store.num_layers, "layers"))


def random_draft(
    skeleton: Skeleton, device: torch.device, seed: int, group_size: int, *, fused: bool = True
) -> list[list[DraftExpert]]:
    """[layer][expert] of random INT4 codes, each alike likely, with the scale that gives them the spread of
    the other weights. fused: see LowBitLinear."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    return [
        [_random_expert(experts, device, generator, group_size, fused) for _ in range(skeleton.num_experts)]
        for experts in skeleton.experts
    ]


def random_packed_draft(
    skeleton: Skeleton, device: torch.device, seed: int, group_size: int
) -> list[LowBitExperts]:
    """The same for the GPU's kernels."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    layers = []
    for experts in skeleton.experts:
        layer = empty_layer(experts, skeleton.num_experts, 4, group_size, device)
        for packed in (layer.gate_up, layer.down):
            packed.words.view(torch.uint8).random_(0, 256, generator=generator)
            packed.scales.fill_(SPREAD / _INT4_SPREAD)
        layers.append(layer)
    return layers


def _random_expert(
    experts: ExpertsModule, device: torch.device, generator: torch.Generator, group_size: int, fused: bool
) -> DraftExpert:
    def matrix(shape: tuple[int, int]) -> LowBitLinear:
        rows, columns = shape[::-1] if experts.layout.transposed else shape
        groups = -(-columns // group_size)
        codes = torch.randint(
            16, (rows, groups * group_size), dtype=torch.uint8, device=device, generator=generator
        )
        scales = torch.full((rows, groups), SPREAD / _INT4_SPREAD, dtype=torch.float16, device=device)
        return LowBitLinear(CodeMatrix(codes, scales, columns, group_size, 4), device, fused=fused)

    return DraftExpert(matrix(experts.layout.gate_up_shape), matrix(experts.layout.down_shape))
