"""The bytes that a calibrated layer says it takes against a count of the tensors that live while it runs."""

from __future__ import annotations

import pytest
import torch
from calibrated_reference import Layer
from test_gptq_memory import measured

from localmoe.core.draft_config import GptqSettings
from localmoe.kernels import codes
from localmoe.quant import gptq_memory
from localmoe.quant.calibrated_layer import CalibratedLayer, LayerTokens, chunk_bytes


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "tokens", "dtype", "gate_weighted", "at_once"),
    [
        (512, 256, 8, 3000, torch.bfloat16, True, 3),
        (256, 768, 4, 4000, torch.float32, False, 1),
        (384, 384, 8, 1000, torch.float32, True, 8),
    ],
)
def test_no_more_lives_at_once_than_the_budget_allows(
    hidden: int, inner: int, experts: int, tokens: int, dtype: torch.dtype, gate_weighted: bool, at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With an expert that every token chooses."""
    monkeypatch.setattr(codes, "_CHUNK_ELEMENTS", 1 << 14)  # so that the search's share is small here too
    monkeypatch.setattr(gptq_memory, "_SEARCH_BYTES", 8 * 4 * (1 << 14))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.1).to(dtype)

    layer = Layer(normal(experts, 2 * inner, hidden), normal(experts, hidden, inner))
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] = 2
    routed = LayerTokens(
        normal(tokens, hidden), scores.topk(2).indices, normal(tokens, 2).abs(), tokens // 16
    )
    said = chunk_bytes(at_once, hidden, inner, 128, dtype.itemsize) + tokens * hidden * 4
    chunks: list[None] = []

    def run() -> None:
        problem = CalibratedLayer(routed, layer, GptqSettings(gate_weighted=gate_weighted), said)
        for _ in problem.experts(lambda: chunks.append(None)):
            pass

    held = (layer.gate_ups, layer.downs, routed.hidden, routed.index, routed.weights)
    peak = measured(run, *held) - sum(tensor.nbytes for tensor in held)
    assert len(chunks) == 2 * -(-experts // at_once) + experts, "the budget was used"
    assert 0.4 * said < peak <= said, (peak, said)
