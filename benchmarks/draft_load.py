"""How long a low-bit draft takes from its files (in the page cache) to what computes it.

    python benchmarks/draft_load.py [--shape qwen1.5-moe-a2.7b] [--layers 4] [--device cuda]

The draft is random, of so many layers of the shape; seconds are also given for all of the shape's layers. On
a GPU codes are unpacked there, and, to compare, on the CPU. Issuing operations is a part of that, so they are
counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from localmoe.engine.draft_layers import LayerReader
from localmoe.kernels.codes import CodeMatrix
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.kernels.lowbit_rows import PackedRows
from localmoe.model.shapes import find_shape
from localmoe.model.skeleton import ExpertsModule, skeleton_from_config
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.draft_writer import DraftWriter
from localmoe.quant.expert_names import PROJECTION_NAMES, ExpertNaming

GROUP = 128


def random_matrix(rows: int, columns: int, device: torch.device) -> CodeMatrix:
    """Codes and scales, which is all that loading looks at."""
    groups = -(-columns // GROUP)
    codes = torch.randint(0, 16, (rows, groups * GROUP), dtype=torch.uint8, device=device)
    codes[:, columns:] = 8
    return CodeMatrix(codes, torch.rand(rows, groups, device=device).half(), columns, GROUP, 4)


def write_draft(folder: Path, layers: list[ExpertsModule], num_experts: int, device: torch.device) -> None:
    """The same few matrices for every expert: what they hold does not matter."""
    inner, hidden = sizes(layers[0])
    matrices = random_matrix(inner, hidden, device), random_matrix(inner, hidden, device)
    expert = (*matrices, random_matrix(hidden, inner, device))
    provenance = DraftProvenance.now("random", "0" * 64, "gptq", GROUP, 4)
    num_bytes = len(layers) * num_experts * 3 * inner * hidden * 5 // 8
    naming = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", *PROJECTION_NAMES[0])
    with DraftWriter(folder, {"model_type": "random"}, naming, provenance, num_bytes) as writer:
        for layer in layers:
            writer.add_layer(layer.decoder_layer, [expert] * num_experts)
        writer.publish()


def sizes(layer: ExpertsModule) -> tuple[int, int]:
    """I and H."""
    down = layer.layout.down_shape
    return (down[0], down[1]) if layer.layout.transposed else (down[1], down[0])


class Operations(TorchDispatchMode):
    """How many there are, but for those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations_to_pack(rows: int, columns: int, bits: int) -> int:
    """Of one matrix whose codes are on the device already, as they are in `LayerReader.packed`."""
    codes = torch.randint(0, 1 << bits, (rows, -(-columns // GROUP) * GROUP), dtype=torch.uint8)
    scales = torch.rand(rows, codes.shape[1] // GROUP).half()
    packed = PackedRows.empty((1, rows, columns), bits, GROUP, "cpu")
    with Operations() as operations:
        packed.set_expert(0, CodeMatrix(codes, scales, columns, GROUP, bits))
    return int(operations.count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    skeleton = skeleton_from_config(find_shape(args.shape).config(), torch.bfloat16, args.shape)
    layers, num_experts = skeleton.experts[: args.layers], skeleton.num_experts
    inner, hidden = sizes(layers[0])
    for bits in (2, 3, 4, 8):
        print(f"packing gate and up in {bits} bits: {operations_to_pack(2 * inner, hidden, bits)} operations")
    with tempfile.TemporaryDirectory(prefix="localmoe-") as folder:
        path = Path(folder) / "draft"
        write_draft(path, list(layers), num_experts, device)
        draft = DraftCheckpoint.open(path)
        readers = [LayerReader(draft.reader(draft.naming()), layer, num_experts, device) for layer in layers]
        packed = [reader.packed() for reader in readers] if device.type == "cuda" else []
        for kind in ("unpacked on the GPU", "unpacked on the CPU") * 2 if packed else ("for the CPU",) * 2:
            started = time.perf_counter()
            for reader, layer in zip(readers, packed or readers, strict=True):
                if kind.endswith("the GPU"):
                    reader.packed()
                elif isinstance(layer, LowBitExperts):
                    reader.refill(layer)
                else:
                    reader.matrices()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took_s = time.perf_counter() - started
            each_ms = 1e3 * took_s / len(layers) / num_experts
            whole_s = took_s / len(layers) * len(skeleton.experts)
            print(
                f"{args.shape}, {kind}: {each_ms:.1f} ms an expert, {whole_s:.1f} s for all "
                f"{len(skeleton.experts)} layers"
            )


if __name__ == "__main__":
    main()
