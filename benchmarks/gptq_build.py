"""Builds the GPTQ draft of a model of a real shape with random weights, and says where the time went.

python benchmarks/gptq_build.py [--shape qwen1.5-moe-a2.7b] [--budget 8GiB] [--layers N] [--tokens 65536]

Weights and calibration tokens are random, so routing is even and errors mean nothing; times, memory and
bytes written are measured. Stages are timed with the GPU waited for before and after, which costs little.
TFLOP/s count the multiplications and additions of the textbook algorithm, 2 n K^2 a Hessian, K^3 for
inverse and factors, N K^2 for the columns' feedback, and those of the layers' passes not at all.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from localmoe.core.draft_config import GptqSettings
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Progress
from localmoe.core.units import format_bytes, parse_bytes
from localmoe.engine.drafts import HostExpertSource
from localmoe.engine.random_source import RandomSource
from localmoe.model.gptq_build import BATCH, GptqBuild
from localmoe.model.layerwise import LayerwiseModel, _own_tensors, _put
from localmoe.model.shapes import find_shape
from localmoe.quant import calibrated_layer, gptq
from localmoe.quant.builder import estimate_bytes
from localmoe.quant.draft_format import DraftProvenance
from localmoe.quant.draft_progress import DraftProgress
from localmoe.quant.draft_writer import DraftWriter
from localmoe.quant.expert_names import ExpertNaming
from localmoe.quant.hessian import HessianSums

SECONDS: dict[str, float] = defaultdict(float)
FLOPS: dict[str, float] = defaultdict(float)


def timed(owner: Any, name: str, stage: str, flops: Callable[..., float] | None = None) -> None:
    """Count the time in owner.name as `stage`'s."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wait()
        started = time.perf_counter()
        found = original(*args, **kwargs)
        wait()
        SECONDS[stage] += time.perf_counter() - started
        if flops is not None:
            FLOPS[stage] += flops(*args, **kwargs)
        return found

    setattr(owner, name, wrapper)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def watch() -> None:
    """Put clocks around the stages."""
    timed(LayerwiseModel, "routed", "layers up to the experts")
    timed(LayerwiseModel, "advance", "layers as a whole")
    timed(
        HessianSums,
        "add",
        "Hessians",
        lambda self, expert, rows, *_: 2.0 * rows.shape[0] * rows.shape[1] ** 2,
    )
    timed(gptq, "factorise", "factors", lambda h, *_, **__: 1.0 * h.shape[0] * h.shape[1] ** 3)
    timed(gptq, "_expert_scales", "scales")
    timed(gptq, "round_columns", "columns", lambda w, *_: 1.0 * w.shape[0] * w.shape[2] * w.shape[1] ** 2)
    timed(calibrated_layer, "keep_better", "held-out errors")
    timed(calibrated_layer.CalibratedLayer, "_answer", "the experts' answers")
    timed(calibrated_layer.CalibratedLayer, "_stacked", "weights to the device")
    timed(DraftProgress, "add", "writing")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budget", default="8GiB")
    parser.add_argument("--layers", type=int, help="cut the model to so many decoder layers")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="no clocks inside")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shape = find_shape(args.shape)
    if args.layers:
        shape = replace(shape, dimensions={**shape.dimensions, "num_hidden_layers": args.layers})
    source = RandomSource(shape, SyntheticSettings())
    skeleton = source.skeleton(torch.bfloat16 if device.type == "cuda" else torch.float32)
    store = source.load_weights(skeleton, device, progress=None, cancel=None)
    for module, key, tensor in list(_own_tensors(skeleton.model)):
        _put(module, key, tensor.cpu())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = GptqSettings(bits=args.bits, num_tokens=args.tokens)
    count = args.tokens // settings.sequence_length // BATCH * BATCH
    vocabulary = int(skeleton.text_config.vocab_size)
    tokens = torch.randint(
        vocabulary, (count, settings.sequence_length), generator=torch.Generator().manual_seed(0)
    )
    experts = HostExpertSource(skeleton, store)
    naming = ExpertNaming("model.layers.{layer}.mlp.experts.{expert}", "gate_proj", "up_proj", "down_proj")
    if not args.plain:
        watch()
    with tempfile.TemporaryDirectory() as folder:
        provenance = DraftProvenance.now(args.shape, "0" * 64, "gptq", settings.group_size, settings.bits)
        estimate = estimate_bytes(experts, settings.bits, settings.group_size)
        with DraftWriter(Path(folder) / "draft", {}, naming, provenance, estimate) as writer:
            last: list[Progress] = []
            started = time.perf_counter()
            build = GptqBuild(skeleton, store, tokens, settings, device, parse_bytes(args.budget))
            build.run(writer, progress=lambda report: last.__setitem__(slice(None), [report]))
            path = writer.publish()
            seconds = time.perf_counter() - started
        written = sum(file.stat().st_size for file in path.iterdir())
    print(
        f"synthetic: {args.shape}, {store.num_layers} x {store.num_experts} experts, {tokens.numel():,} "
        f"tokens, {args.bits} bits, {name}, torch {torch.__version__}: {seconds:.1f} s, "
        f"{format_bytes(written)} written; "
        f"{last[0].detail if last else ''}"
    )
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(
            f"synthetic: budget {args.budget}, peak {format_bytes(peak)}, reserved {format_bytes(reserved)}"
        )
    for stage, spent in sorted(SECONDS.items(), key=lambda item: -item[1]):
        rate = f", {FLOPS[stage] / spent / 1e12:.1f} TFLOP/s" if FLOPS.get(stage) else ""
        print(f"synthetic:   {stage:26s} {spent:7.1f} s{rate}")
    if SECONDS:
        print(f"synthetic:   {'the rest':26s} {seconds - sum(SECONDS.values()):7.1f} s")


if __name__ == "__main__":
    main()
