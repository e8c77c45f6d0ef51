"""On a trained model, the embedded one, GPTQ drafts choose what the target chooses more often than rounded
ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gptq_builds import SMALL, build
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.hub.catalogue import demo_folder
from localmoe.kernels.codes import dequantize, quantize_rtn
from localmoe.quant.calibration import read_calibration
from localmoe.quant.draft_checkpoint import DraftCheckpoint

Weights = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]  # of (layer, expert, gate_up, down)
CALIBRATING = 4096  # tokens


class Demo:
    """The embedded model in transformers, and what it says of documents that no draft was calibrated on."""

    def __init__(self) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
        self.model = model.eval()
        self.experts = [layer.mlp.experts for layer in model.model.layers]
        self.original = [(e.gate_up_proj.data.clone(), e.down_proj.data.clone()) for e in self.experts]
        self.texts = held_out()
        self.target = self._read(self.texts)

    @torch.inference_mode()
    def _read(self, texts: Tensor) -> Tensor:
        """(N, T, V) log-probabilities of (N, T) tokens."""
        found = [self.model(input_ids=ids, use_cache=False).logits for ids in texts.split(4)]
        return torch.cat(found).log_softmax(-1)

    @torch.inference_mode()
    def compare(self, weights: Weights, num_texts: int | None = None) -> tuple[float, float]:
        """With these weights in the experts: the share of the texts' tokens, or of the first ones' alone,
        whose first choice is the target's, and the mean divergence KL(target || draft)."""
        for layer, (experts, (gate_up, down)) in enumerate(zip(self.experts, self.original, strict=True)):
            for e in range(gate_up.shape[0]):
                new = weights(layer, e, gate_up[e], down[e])
                experts.gate_up_proj.data[e], experts.down_proj.data[e] = new
        draft, target = self._read(self.texts[:num_texts]), self.target[:num_texts]
        agreeing = (draft.argmax(-1) == target.argmax(-1)).float().mean()
        divergence = (target.exp() * (target - draft)).sum(-1).mean()
        return float(agreeing), float(divergence)


def held_out() -> Tensor:
    """(8, 512) tokens of the documents of the built-in text that a calibration of seed 0 takes last."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder())
    text = read_calibration()
    order = np.random.default_rng(0).permutation(len(text.documents))
    ids = [tokenizer(text.documents[i], verbose=False)["input_ids"] for i in order]
    lengths = np.cumsum([len(document) for document in ids])
    assert lengths[-1] - lengths[np.searchsorted(lengths, CALIBRATING)] > 8 * 512, "held out"
    last = [token for document in ids for token in document][-8 * 512 :]
    return torch.tensor(last).view(8, 512)


def rounded(bits: int) -> Weights:
    def weights(layer: int, expert: int, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (dequantize(quantize_rtn(weight, bits, 128), torch.float32) for weight in (gate_up, down))
        return a, b

    return weights


def of_draft(folder: Path) -> Weights:
    draft = DraftCheckpoint.open(folder)
    naming = draft.naming()
    read: dict[int, list[tuple[Tensor, ...]]] = {}

    def weights(layer: int, expert: int, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in read:
            shape = (gate_up.shape[0] // 2, gate_up.shape[1])
            read[layer] = [
                tuple(dequantize(matrix, torch.float32) for matrix in matrices)
                for matrices in draft.reader(naming).layer(layer, 16, shape)
            ]
        gate, up, below = read[layer][expert]
        return torch.cat([gate, up]), below

    return weights


@pytest.mark.slow
def test_gptq_agrees_with_the_target_more_often_than_rounding_does(tmp_path: Path) -> None:
    demo = Demo()
    # as many as are read at once: others would be multiplied in other pieces
    assert demo.compare(lambda layer, expert, gate_up, down: (gate_up, down), num_texts=4) == (1, 0)
    for bits, better in ((4, 0.0), (3, 0.01)):
        settings = replace(SMALL, gptq=GptqSettings(bits=bits, num_tokens=CALIBRATING))
        draft, _ = build("demo", tmp_path / str(bits), settings)
        agreeing, divergence = demo.compare(of_draft(draft))
        nearest_agreeing, nearest_divergence = demo.compare(rounded(bits))
        assert nearest_agreeing > 0.8, "the embedded model is a trained one"
        assert agreeing >= nearest_agreeing + better, (bits, agreeing, nearest_agreeing)
        assert divergence < 0.9 * nearest_divergence, (bits, divergence, nearest_divergence)
