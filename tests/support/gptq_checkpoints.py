"""GPTQ checkpoints of tiny models, as others make them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from localmoe.engine.drafts import DraftInfo, HostExpertSource, expert_naming, load_draft
from localmoe.engine.sources import CheckpointSource
from localmoe.experts.host_store import HostStore
from localmoe.kernels.codes import CodeMatrix, dequantize, quantize_rtn
from localmoe.model.skeleton import Skeleton
from localmoe.quant.base_check import DraftBase
from localmoe.quant.expert_names import ExpertNaming
from localmoe.quant.packing import pack_matrix

CPU = torch.device("cpu")


@dataclass
class Model:
    """A loaded tiny model and what a draft is held against."""

    source: CheckpointSource
    skeleton: Skeleton
    store: HostStore
    naming: ExpertNaming

    @classmethod
    def load(cls, folder: Path) -> Model:
        source = CheckpointSource.open(str(folder))
        skeleton = source.skeleton(torch.float32)
        store = source.load_weights(skeleton, CPU, progress=None, cancel=None)
        return cls(source, skeleton, store, expert_naming(source.checkpoint, skeleton))

    @property
    def base(self) -> DraftBase:
        experts = HostExpertSource(self.skeleton, self.store)
        return DraftBase("tiny", "f" * 64, "", self.source.checkpoint.config, experts)

    def draft(self, folder: Path, *, packed: bool) -> tuple[DraftInfo, Any]:
        return load_draft(folder, self.skeleton, CPU, base=self.base, packed=packed)


def quantise(weight: Tensor, bits: int, seed: int | None) -> CodeMatrix:
    """In groups of 32; with a seed, groups are of shuffled columns."""
    if seed is None:
        return quantize_rtn(weight, bits, 32)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    found = quantize_rtn(weight[:, order], bits, 32)
    return CodeMatrix(found.codes, found.scales, weight.shape[1], 32, bits, order)


Quantised = dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]


def write_checkpoint(
    model: Model, folder: Path, bits: int = 4, *, act_order: bool = False, same_order: bool = True
) -> Quantised:
    """A GPTQ checkpoint of the model as others make them; the weights that it stands for."""
    source, tensors, weights = model.base.experts, {}, {}
    for layer in range(source.num_layers):
        for expert in range(source.num_experts):
            seed = 10 * (100 * layer + expert)
            seeds = (seed, seed + (not same_order), seed + 2) if act_order else (None, None, None)
            matrices = [
                quantise(weight.float(), bits, order)
                for weight, order in zip(source.matrices(layer, expert), seeds, strict=True)
            ]
            for name, matrix in zip(("gate", "up", "down"), matrices, strict=True):
                module = model.naming.module(source.decoder_layer(layer), expert, name)  # type: ignore[arg-type]
                tensors |= pack_matrix(matrix, 2).named(module)
            weights[layer, expert] = tuple(dequantize(matrix, torch.float64) for matrix in matrices)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    quantization = {
        "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits, "group_size": 32, "sym": True,
        "desc_act": act_order,
    }  # fmt: skip
    config = {**model.source.checkpoint.config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return weights
