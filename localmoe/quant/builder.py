"""Quantises a model's routed experts, each matrix on its own: to the nearest integers, or to NF4. Knows
neither where the weights come from nor where drafts lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from localmoe.core.errors import DraftError, LocalMoeError
from localmoe.core.types import Progress, ProgressCallback
from localmoe.kernels.codes import CodeMatrix, check_group_size, quantize_rtn
from localmoe.quant.draft_writer import DraftWriter, ExpertMatrices
from localmoe.quant.expert_names import PROJECTIONS
from localmoe.quant.gptq_layout import GptqLayout
from localmoe.quant.matrix_layout import MatrixLayout
from localmoe.quant.nf4 import bitsandbytes_functional, quantize_nf4

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

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate (I, H), up (I, H) and down (H, I)."""
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
    _build(source, writer, lambda weight: quantize_rtn(weight, bits, group_size), report)


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


def _build(
    source: ExpertSource,
    writer: DraftWriter,
    quantize: Callable[[Tensor], CodeMatrix],
    report: _Reporter,
) -> None:
    for layer in range(source.num_layers):
        writer.add_layer(source.decoder_layer(layer), _quantized_experts(source, layer, quantize, report))
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


def _quantized_experts(
    source: ExpertSource, layer: int, quantize: Callable[[Tensor], CodeMatrix], report: _Reporter
) -> Iterator[ExpertMatrices]:
    for expert in range(source.num_experts):
        report.check_cancel()
        found: list[CodeMatrix] = []
        for projection, weight in zip(PROJECTIONS, source.matrices(layer, expert), strict=True):
            try:
                found.append(quantize(weight))
            except ValueError as error:
                raise DraftError(
                    f"No draft can be built of this model: in decoder layer {source.decoder_layer(layer)}, "
                    f"expert {expert}, {projection} projection, {error}; download the model again."
                ) from None
        yield found[0], found[1], found[2]
        report.expert_done()


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
