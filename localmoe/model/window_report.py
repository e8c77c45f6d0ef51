"""What passes on the GPU tell the host, and how a window's numbers are read. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localmoe.experts.lane_block import LaneBlock, LaneReport


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a draft pass tells the host.

    Attributes:
        experts: int (L, K), what the draft's routers chose; confidences: their weights.
        margin: of the token that it chose, see speculative.margin_rates.
    """

    experts: NDArray[np.int32]
    confidences: NDArray[np.float32]
    margin: float


@dataclass(frozen=True, slots=True)
class WindowReport:
    """What a window's pass tells the host, or a prompt's that asks as one does.

    Attributes:
        log: int (L, E), how each expert was found, see kernels.residency.
        experts: int (L, T, K), what the routers chose.
        choices: the token that is chosen after each one, NO_CHOICE where the logits are no numbers; none of a
            prompt.
        tokens: the tokens after the first, as the pass read them; none of a prompt.
        start: position of the first token, and live: tokens, that the pass was about; both as a window read
            them.
        lane: what became of the CPU lane's jobs; None of a pass without it.
        waited_s: for experts that were not in VRAM, see kernels.gpu.waiting.
    """

    log: NDArray[np.int32]
    experts: NDArray[np.int32]
    choices: list[int]
    tokens: list[int]
    start: int
    live: int
    lane: LaneReport | None = None
    waited_s: float = 0.0

    @property
    def agreed(self) -> int:
        """How many of the tokens, up to the first that is not, are the pass's own choices."""
        pairs = enumerate(zip(self.tokens, self.choices, strict=False))
        return next((row for row, (token, choice) in pairs if token != choice), len(self.tokens))


def read_draft(report: NDArray[np.int32], shape: tuple[int, int]) -> DraftReport:
    """A draft pass's int32 numbers. shape: layers, experts a token."""
    experts, weights = report[:-1].reshape(2, *shape)
    return DraftReport(experts, weights.view(np.float32), float(report[-1:].view(np.float32)[0]))


def read_window(
    report: NDArray[np.int32], shape: tuple[int, int, int], count: int, rows: int
) -> WindowReport:
    """From the numbers of a pass of `rows` rows, of which `count` are the window's. shape: L, E and K."""
    layers, experts, top_k = shape
    sizes = [layers * experts, layers, layers * rows * top_k, rows, 3 + rows]
    log, waited_ns, routed, choices, window, lane = np.split(report, np.cumsum(sizes))
    (start, live, _), tokens = window[:3].tolist(), window[3:]
    return WindowReport(
        log.reshape(layers, experts),
        routed.reshape(layers, rows, top_k)[:, :count],
        choices[:count].tolist(),
        tokens[1:count].tolist(),
        start,
        live,
        LaneBlock.read(lane) if lane.size else None,
        float(waited_ns.sum(dtype=np.int64)) / 1e9,
    )


def read_prompt(
    report: NDArray[np.int32], shape: tuple[int, int, int], start: int, count: int
) -> WindowReport:
    """From the numbers of a prompt's pass of `count` tokens, from `start` on. shape: L, E and K."""
    layers, experts, top_k = shape
    sizes = [layers * experts, layers, layers * count * top_k]
    log, waited_ns, routed, lane = np.split(report, np.cumsum(sizes))
    return WindowReport(
        log.reshape(layers, experts),
        routed.reshape(layers, count, top_k),
        [],
        [],
        start,
        count,
        LaneBlock.read(lane) if lane.size else None,
        float(waited_ns.sum(dtype=np.int64)) / 1e9,
    )
