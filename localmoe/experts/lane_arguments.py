"""The memory that the CPU lane's threads share: what they are told of a model's experts, and room for what
they compute. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.core.types import ExpertKey
from localmoe.experts.disk_store import DiskStore
from localmoe.experts.lane_attention import LaneAttention
from localmoe.experts.record_store import RecordStore
from localmoe.kernels.activations import Activation
from localmoe.kernels.cpu import control
from localmoe.kernels.cpu.codings import CODED
from localmoe.kernels.cpu.fetch_ahead import most_blocks_ahead
from localmoe.kernels.cpu.gathered_rows import room_words, shared_words
from localmoe.kernels.cpu.processor import may_use_tiles
from localmoe.kernels.cpu.products import KINDS, activations_kind
from localmoe.kernels.mailbox import Mailbox, MailboxLayout, word_type
from localmoe.kernels.mxfp4_tiles import TILE_ROWS
from localmoe.kernels.weight_forms import WeightForm

_BITS = {
    WeightForm.PLAIN: 16,
    WeightForm.MXFP4: 4,
    WeightForm.BF12: 12,
    WeightForm.FP8: 8,
    WeightForm.NVFP4: 4,
    WeightForm.INT4: 4,
    WeightForm.INT4_32: 4,
}


def worker_arguments(
    store: RecordStore,
    activation: Activation,
    biases: Sequence[Sequence[Tensor | None]],
    box: Mailbox,
    dtype: torch.dtype,
    threads: int,
    control_words: NDArray[np.int64],
    dense: NDArray[np.int64],
    attention: LaneAttention | None,
    matrix_unit: bool,
) -> tuple[Any, ...]:
    """All that threads share, in the order of worker.run's arguments from `control` on.

    Args:
        biases: for each layer gate_up's (E, 2I), without a gate (E, I), and down's (E, H), on the host; they
            have to stay alive.
        dtype: of activations.
        attention: what describes its jobs, where such come.
        matrix_unit: experts of several tokens may be computed by it, see unit_computes.
    """
    layout = box.layout
    form = store.layouts[0].form
    plain = form is WeightForm.PLAIN
    assert plain or store.dtype == torch.bfloat16, "of which the numbers of other forms are"
    transposed = store.layouts[0].transposed and plain
    assert activation.gated or form is not WeightForm.MXFP4, "published codes have a gate"
    if store.layouts[0].packed:
        assert not (store.layouts[0].transposed or activation.interleaved), "gate's rows come before up's"
    if form is WeightForm.BF12:
        assert dtype in (torch.bfloat16, torch.float32), "float16 has no room for 2^64 times them"
    sizes = [each.inner for each in store.layouts]
    assert all(each.gated == activation.gated for each in store.layouts), "or rows are counted wrongly"
    matrices = 2 if activation.gated else 1
    shape = [layout.top_k, activation.interleaved, KINDS.index(activation.kind), matrices]
    pairs, entries = layout.num_pairs, layout.entries
    x_kind = activations_kind(dtype == torch.bfloat16, transposed)
    in_place = plain and box.x.dtype == x_kind
    word = word_type(store.dtype)(0)
    scratch_rows = 4 if plain else 2 * TILE_ROWS
    scratch = max(pairs, control.WIDER * max(2 * control.GATE_UP_ROWS, control.DOWN_ROWS))
    if attention is not None:
        scratch = max(scratch, 2 * control.ATTEND_ROWS * control.ATTEND_POSITIONS // scratch_rows)
    return (
        control_words,
        box.address + layout.posted,
        box.address + layout.answered,
        box.address + layout.foretold,
        *(box.head, box.entries, box.pairs, box.x, box.out),
        np.array(shape, dtype=np.int64),
        np.array([activation.alpha, activation.limit], dtype=np.float32),
        _addresses(store, biases),
        np.array(sizes, dtype=np.int64),
        box.x if in_place else np.zeros((layout.tokens, layout.hidden), dtype=x_kind),
        np.zeros((pairs, max(sizes)), dtype=x_kind),
        np.zeros(pairs, dtype=np.int32),
        np.zeros((2, entries + 1), dtype=np.int64),
        np.zeros(entries + layout.tokens, dtype=np.int64),
        np.zeros(threads * most_blocks_ahead(matrices * layout.hidden, _BITS[form]), dtype=np.int64),
        np.zeros((threads, scratch_rows, scratch), dtype=np.float32),
        _rooms(threads, layout, max(sizes)) if matrix_unit else None,
        *_words_of(form, transposed, word),
        dense,
        None if attention is None else (attention.words, attention.factors),
        np.arange(max(layout.tokens, control.ATTEND_ROWS), dtype=np.int32),
        word,
    )


def on_host(bias: Tensor | None) -> Tensor | None:
    """As threads read it."""
    return None if bias is None else bias.detach().to("cpu").contiguous()


def unit_computes(form: WeightForm, dtype: torch.dtype) -> bool:
    """Whether the processor's matrix unit may compute experts of this form, with activations of `dtype`."""
    return form is WeightForm.BF12 and dtype == torch.bfloat16 and may_use_tiles()


def _rooms(threads: int, layout: MailboxLayout, inner: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each thread, and of all, see gathered_rows."""
    shared = shared_words(layout.num_pairs, layout.entries, inner)
    return np.zeros((threads, room_words(layout.hidden)), dtype=np.int64), np.zeros(shared, dtype=np.int64)


def _words_of(form: WeightForm, transposed: bool, word: np.generic) -> tuple[np.generic | None, ...]:
    """`word` in the place that says what weights are: columned, rowed, coded, packed, see worker."""
    place = 2 if form in CODED else 3 if form is WeightForm.BF12 else 1 - transposed
    return tuple(CODED.get(form, word) if i == place else None for i in range(4))


def _addresses(store: RecordStore, biases: Sequence[Sequence[Tensor | None]]) -> NDArray[np.int64]:
    """(3, L, E): of records, and of their biases, 0 for none."""
    found: NDArray[np.int64] = np.zeros((3, store.num_layers, store.num_experts), dtype=np.int64)
    for layer, pair in enumerate(biases):
        for expert in range(store.num_experts):
            if not isinstance(store, DiskStore):
                found[0, layer, expert] = store.record(ExpertKey(layer, expert)).data_ptr()
            for kind, bias in enumerate(pair):
                found[1 + kind, layer, expert] = 0 if bias is None else bias[expert].data_ptr()
    if isinstance(store, DiskStore):
        store.keep_addresses_in(found[0])
    return found
