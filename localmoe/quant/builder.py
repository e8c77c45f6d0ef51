"""Quantises a model's routed experts, each matrix on its own: to the nearest integers, or to NF4. Knows
neither where the weights come from nor where drafts lie."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from localmoe.core.errors import DraftError, LocalMoeError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.hardware.cpu import core_counts
from localmoe.kernels.codes import CodeMatrix, check_group_size, quantize_rtn
from localmoe.quant.draft_writer import DraftWriter
from localmoe.quant.expert_names import PROJECTIONS
from localmoe.quant.gptq_layout import GptqLayout
from localmoe.quant.matrix_layout import MatrixLayout
from localmoe.quant.nf4 import bitsandbytes_functional, quantize_nf4

_LOG = logging.getLogger(__name__)
_HELD_BYTES = 2 << 30  # of experts that are worked on at once; models with such large ones fill the RAM
_Done = TypeVar("_Done")
_HEADER_BYTES = 2500  # of one expert's twelve tensors in the file header


class DraftCancelledError(LocalMoeError):
    """The draft build was cancelled."""


class ExpertSource(Protocol):
    """A model's routed experts, in their original dtype."""

    num_layers: int  # MoE layers
    num_experts: int  # a layer

    def decoder_layer(self, layer: int) -> int:
        """Decoder-layer index of MoE layer `layer`."""
        ...

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, ...]:
        """gate (I, H), if there is one, up (I, H) and down (H, I)."""
        ...


def build_rtn_draft(
    source: ExpertSource,
    writer: DraftWriter,
    bits: int,
    group_size: int,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Quantise every expert and add it to `writer`, which the caller publishes. `progress` is told after
    every expert.

    Raises:
        DraftCancelledError: `cancel` was set.
        DraftError: the experts do not fit the format, a weight is not finite, or the disk is full.
    """
    report = _Reporter(source, f"Building the {bits}-bit draft by rounding to nearest", progress, cancel)
    workers, rounding = _rounding(source)
    _build(source, writer, lambda weight: rounding(weight, bits, group_size), report, workers)


def build_nf4_draft(
    source: ExpertSource,
    writer: DraftWriter,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """The same to NF4.

    Raises:
        DraftCancelledError: `cancel` was set.
        DraftError: there is no bitsandbytes, the experts do not fit the format, a weight is not finite, or
            the disk is full.
    """
    bitsandbytes_functional()
    _build(source, writer, quantize_nf4, _Reporter(source, "Building the NF4 draft", progress, cancel))


def rounded_experts(
    source: ExpertSource, layer: int, bits: int, group_size: int
) -> Iterator[tuple[CodeMatrix, ...]]:
    """The matrices of each expert of a layer in turn, to the nearest integers; several are worked on at once.

    Raises:
        DraftError: a weight is not finite.
    """
    workers, rounding = _rounding(source)

    def quantize(weight: Tensor) -> CodeMatrix:
        return rounding(weight, bits, group_size)

    with _threads(workers) as pool:
        work = partial(_quantised, source, layer, quantize)
        yield from _in_turn(pool, work, source.num_experts, 2 * workers)


def _rounding(source: ExpertSource) -> tuple[int, Callable[[Tensor, int, int], CodeMatrix]]:
    """How many threads round, and with what: PyTorch's operations keep the cores busy by themselves."""
    weights = source.matrices(0, 0)
    if weights[0].dtype == torch.bfloat16:
        try:
            from localmoe.kernels.cpu.rounding import round_bfloat16
        except ImportError as error:
            _LOG.warning("The draft is rounded by PyTorch, which takes longer: %s", error)
        else:
            held = 2 * sum(weight.numel() for weight in weights)  # bytes: codes, and what is packed of them
            return max(1, min(core_counts()[0], _HELD_BYTES // held)), round_bfloat16
    return 1, quantize_rtn


@contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Of several, each computes PyTorch's operations by itself; one has the help of PyTorch's own."""
    if number == 1:
        with ThreadPoolExecutor(1, "quantise") as pool:
            yield pool
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(number, "quantise", partial(torch.set_num_threads, 1)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # of threads that are yet to come, too


def _build(
    source: ExpertSource,
    writer: DraftWriter,
    quantize: Callable[[Tensor], CodeMatrix],
    report: _Reporter,
    workers: int = 1,
) -> None:
    """A layer is written while the next one is quantised."""
    with _threads(workers) as pool, ThreadPoolExecutor(1, "write") as disk:
        writing: Future[None] | None = None
        for layer in range(source.num_layers):
            tensors: dict[str, Tensor] = {}
            for packed in _packed_experts(source, writer, layer, quantize, report, pool, 2 * workers):
                tensors |= packed
            if writing is not None:
                writing.result()
            writing = disk.submit(writer.add_packed, source.decoder_layer(layer), tensors)
        if writing is not None:
            writing.result()
    report.check_cancel()


class _Reporter:
    """Counts finished experts, tells the caller, and stops the build when asked to."""

    def __init__(
        self,
        source: ExpertSource,
        stage: str,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> None:
        self._stage = stage
        self._done = 0
        self._total = source.num_layers * source.num_experts
        self._progress = progress
        self._cancel = cancel
        self._tell()

    def expert_done(self) -> None:
        self._done += 1
        self._tell()

    def check_cancel(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise DraftCancelledError(
                f"The draft build was cancelled after {self._done} of {self._total} experts; "
                "nothing was kept."
            )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(Progress(self._stage, self._done, self._total, "experts"))


def _packed_experts(
    source: ExpertSource, writer: DraftWriter, layer: int, quantize: Callable[[Tensor], CodeMatrix],
    report: _Reporter, pool: ThreadPoolExecutor, ahead: int,
) -> Iterator[dict[str, Tensor]]:  # fmt: skip
    """What `writer.pack` gives for each, in order; up to `ahead` of them are worked on at once."""
    work = partial(_packed, source, writer, layer, quantize)
    report.check_cancel()
    for packed in _in_turn(pool, work, source.num_experts, ahead):
        yield packed
        report.expert_done()
        report.check_cancel()


def _in_turn(
    pool: ThreadPoolExecutor, work: Callable[[int], _Done], count: int, ahead: int
) -> Iterator[_Done]:
    """What is made of each of so many experts, in order; up to `ahead` of them are worked on at once."""
    experts = iter(range(count))

    def begin(number: int) -> list[Future[_Done]]:
        return [pool.submit(work, expert) for expert in islice(experts, number)]

    under_way = deque(begin(ahead))
    try:
        while under_way:
            yield under_way.popleft().result()
            under_way += begin(1)
    finally:
        for left in under_way:
            left.cancel()


def _packed(
    source: ExpertSource, writer: DraftWriter, layer: int, quantize: Callable[[Tensor], CodeMatrix],
    expert: int,
) -> dict[str, Tensor]:  # fmt: skip
    return writer.pack(source.decoder_layer(layer), expert, _quantised(source, layer, quantize, expert))


def _quantised(
    source: ExpertSource, layer: int, quantize: Callable[[Tensor], CodeMatrix], expert: int
) -> tuple[CodeMatrix, ...]:
    found: list[CodeMatrix] = []
    weights = source.matrices(layer, expert)
    for projection, weight in zip(PROJECTIONS[-len(weights) :], weights, strict=True):
        try:
            found.append(quantize(weight))
        except ValueError as error:
            raise DraftError(
                f"No draft can be built of this model: in decoder layer {source.decoder_layer(layer)}, "
                f"expert {expert}, {projection} projection, {error}; delete the model and download it again."
            ) from None
    return tuple(found)


def estimate_bytes(source: ExpertSource, bits: int, group_size: int) -> int:
    """Size of a draft in the GPTQ format, from the shapes of the first expert.

    Raises:
        DraftError: they do not fit the format.
    """
    try:
        check_group_size(group_size)
    except ValueError as error:
        raise DraftError(f"No draft can be built of this model: {error}.") from None
    return estimate_layout_bytes(source, GptqLayout(bits, group_size))


def estimate_layout_bytes(source: ExpertSource, layout: MatrixLayout) -> int:
    """The same in any format.

    Raises:
        DraftError: the experts do not fit it.
    """
    expert_bytes = _HEADER_BYTES
    try:
        for weight in source.matrices(0, 0):
            expert_bytes += layout.num_bytes(weight.shape[0], weight.shape[1])
    except ValueError as error:
        raise DraftError(f"No draft can be built of this model: {error}.") from None
    return expert_bytes * source.num_layers * source.num_experts
