"""How long a load takes to make the draft of a model that has none: rounding, packing, writing.

    python benchmarks/rounded_draft.py [--shape qwen1.5-moe-a2.7b] [--layers 2] [--bits 4] [--folder DIR]

Random bfloat16 experts of the shape, on the CPU. Times are for an expert; the draft of the whole model is
worked out from them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localmoe.hardware.cpu import core_counts
from localmoe.kernels.codes import CodeMatrix, quantize_rtn
from localmoe.kernels.cpu.rounding import round_bfloat16
from localmoe.model.shapes import find_shape
from localmoe.quant import DraftProvenance, DraftWriter, ExpertNaming, build_rtn_draft
from localmoe.quant.builder import estimate_bytes
from localmoe.quant.gptq_layout import GptqLayout

GROUP_SIZE = 128
NAMING = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")


@dataclass
class Experts:
    """The same three random matrices for every expert; each caller gets memory of its own."""

    num_layers: int
    num_experts: int
    hidden: int
    inner: int
    made: tuple[Tensor, Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shapes = ((self.inner, self.hidden),) * 2 + ((self.hidden, self.inner),)
        gate, up, down = ((torch.randn(shape) * 0.02).bfloat16() for shape in shapes)
        self.made = gate, up, down

    def decoder_layer(self, layer: int) -> int:
        return layer

    def matrices(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (weight.clone() for weight in self.made)
        return gate, up, down


def experts_of(config: Any, layers: int) -> Experts:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(int(found) for name in names if (found := getattr(config, name, None)))
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return Experts(layers, num_experts, config.hidden_size, inner)


def ms_of(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e3 * (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--folder", help="on the disk to write to")
    args = parser.parse_args()
    config = find_shape(args.shape).config()
    source = experts_of(config, args.layers)
    layout = GptqLayout(args.bits, GROUP_SIZE)

    def quantised(by: Callable[[Tensor, int, int], CodeMatrix]) -> list[CodeMatrix]:
        return [by(weight, args.bits, GROUP_SIZE) for weight in source.made]

    codes = quantised(round_bfloat16)
    print(f"synthetic: {args.shape}, {args.bits} bits, {core_counts()[0]} cores, ms an expert:")
    threads = torch.get_num_threads()
    print(f"  rounded by PyTorch with {threads} threads: {ms_of(lambda: quantised(quantize_rtn)):.1f}")
    print(f"  rounded by compiled loops in one thread: {ms_of(lambda: quantised(round_bfloat16)):.1f}")
    print(f"  packed: {ms_of(lambda: [layout.pack(matrix) for matrix in codes]):.1f}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        recipe = DraftProvenance.now("synthetic", "0" * 64, "rtn", GROUP_SIZE, args.bits)
        size = estimate_bytes(source, args.bits, GROUP_SIZE)
        began = time.perf_counter()
        with DraftWriter(Path(folder) / "draft", {}, NAMING, recipe, size) as writer:
            build_rtn_draft(source, writer, args.bits, GROUP_SIZE)
            writer.publish()
        took = time.perf_counter() - began
    experts = source.num_layers * source.num_experts
    whole = took * int(config.num_hidden_layers) / source.num_layers
    print(f"  all of it: {1e3 * took / experts:.1f}; the whole model {whole:.0f} s")


if __name__ == "__main__":
    main()
