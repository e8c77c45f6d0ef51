"""A model published in MXFP4 (gpt-oss), its experts kept so, with and without the CPU's help: time to load,
memory, speed; with --draft also with a draft of integers, by draft length. Needs a GPU, RAM for the experts,
and room on a disk.

    python benchmarks/mxfp4.py [--shape gpt-oss-20b] [--layers 24] [--budget 16] [--lanes auto vram+link]
    python benchmarks/mxfp4.py --demo --draft [--lengths 0 8 32 auto]

Weights are random and written as such a checkpoint first, so routing is what random routers make of random
prompts, and how sure the model is of its words says nothing of a trained one. With --demo it is the embedded
model, its experts rounded to MXFP4, which answers the bundled prompts greedily. Everything is measured;
nothing is simulated.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from first_start import DEMO
from load_speed import in_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.mxfp4_models import say_mxfp4, to_mxfp4

from localmoe.core.config import EngineConfig, GenerationRequest, Lanes, SamplingConfig
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.stats import GenerationStats
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine.drafts import HostExpertSource
from localmoe.engine.sources import CheckpointSource
from localmoe.model.shapes import find_shape

TOKENIZER_WORDS = 4000  # that the embedded tokenizer knows, at least
PROMPT = 900  # tokens of a long one
SPREAD = 0.02  # of 16-bit weights
EXPONENTS = (119, 122)  # of scales, so that experts' weights spread alike
LANES: tuple[Lanes, ...] = ("auto", "vram+link", "vram+cpu", "all")
SAMPLING = SamplingConfig(temperature=0.7, seed=1)


def stored(name: str, shape: list[int], device: torch.device) -> Tensor:
    """Random values of one tensor of a checkpoint."""
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if name.endswith("_scales"):
        return torch.randint(*EXPONENTS, shape, dtype=torch.uint8, device=device)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    if name.endswith(("bias", "sinks")):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device) * SPREAD


def write_model(folder: Path, shape: str, layers: int, device: torch.device) -> float:
    """A checkpoint of the shape with so many layers; its gigabytes."""
    dimensions = dict(find_shape(shape).dimensions)
    dimensions |= {"num_hidden_layers": layers, "layer_types": dimensions["layer_types"][:layers]}
    config = replace(find_shape(shape), dimensions=dimensions).config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    torch.manual_seed(0)
    size, parts = 0.0, list(by_layer((name, list(p.shape)) for name, p in model.named_parameters()))
    for number, part in enumerate(parts, 1):
        tensors = {
            name: stored(name, shape, device).cpu()
            for parameter, dims in part
            for name, shape in in_blocks(parameter, dims).items()
        }
        size += sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        save_file(tensors, folder / f"model-{number:05}-of-{len(parts):05}.safetensors", {"format": "pt"})
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return size


def write_demo(folder: Path) -> float:
    """The embedded model, its experts rounded; its gigabytes."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("draft*"), dirs_exist_ok=True)
    source = CheckpointSource.open("demo")
    skeleton = source.skeleton(source.stored_dtype)
    store = source.load_weights(skeleton, torch.device("cpu"), progress=None, cancel=None)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    experts = HostExpertSource(skeleton, store)
    for layer, module in enumerate(skeleton.experts):
        all_of_it = [experts.matrices(layer, expert) for expert in range(skeleton.num_experts)]
        gate_up = torch.stack([torch.cat([gate, up]) for gate, up, _ in all_of_it])
        down = torch.stack([down for _, _, down in all_of_it])
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            blocks, scales = to_mxfp4(weight)
            tensors |= {f"{module.path}.{name}_blocks": blocks, f"{module.path}.{name}_scales": scales}
    save_file(tensors, file, {"format": "pt"})
    say_mxfp4(folder)
    return sum(tensor.nbytes for tensor in tensors.values()) / 1e9


def by_layer(parameters: Iterator[tuple[str, list[int]]]) -> Iterator[list[tuple[str, list[int]]]]:
    """Lists of neighbours that belong to the same layer, or to none."""
    part: list[tuple[str, list[int]]] = []
    for name, shape in parameters:
        if part and layer_of(part[0][0]) != layer_of(name):
            yield part
            part = []
        part.append((name, shape))
    yield part


def layer_of(name: str) -> str:
    """The number of the layer, as text."""
    return name.split(".")[2] if ".layers." in name else ""


def request_of(number: int, args: argparse.Namespace) -> GenerationRequest:
    """The one that belongs to a number."""
    if args.demo:
        prompt = read_prompts(BUNDLED_PROMPTS)[number]
        return GenerationRequest((Message("user", prompt.text),), max_new_tokens=args.tokens)
    ids = np.random.default_rng(number).integers(3, TOKENIZER_WORDS, 80).tolist()
    return GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=args.tokens, sampling=SAMPLING)


def answer(engine: Engine, request: GenerationRequest) -> tuple[GenerationStats, float]:
    """Statistics, and tokens a second behind the first without the time in which passes were captured."""
    before: float | None = None
    for event in engine.stream(request):
        stats = event.stats
        before = engine.live.capture_s() if before is None and event.token_ids else before
    assert before is not None, "an answer has a token"
    steps = max(1, stats.new_tokens - 1)
    seconds = (stats.tpot_s or 0.0) * steps - (engine.live.capture_s() - before)
    return stats, steps / max(1e-9, seconds)


def measure(folder: Path, args: argparse.Namespace, lanes: Lanes) -> None:
    """Load and answer with whatever draft the engine takes."""
    context = 1024 if args.demo else 2048
    config = EngineConfig(
        device="cuda",
        context=context,
        vram_budget_bytes=int(args.budget * 2**30),
        lanes=lanes,
        draft_length=4 if args.draft else "auto",  # a length asks for a draft
    )
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with Engine.load(str(folder), config) as engine:
        info, plan = engine.info(), engine.plan
        print(
            f"draft {info.draft}, loaded in {time.perf_counter() - began:.1f} s; "
            f"{100 * plan.resident_share:.0f} % of the experts in slots of {plan.slot_bytes / 1e6:.1f} MB, "
            f"{plan.host_bytes / 1e9:.1f} GB of RAM; {info.lanes}",
            flush=True,
        )
        for length in args.lengths if plan.drafting else [0]:
            ask_all(engine, args, f"draft length {length}", draft_length=length)
        if plan.drafting:
            ask_all(engine, args, "draft only (approximate)", draft_only=True)
        for seed in (1, 2):  # the first one captures passes
            ids = np.random.default_rng(seed).integers(3, TOKENIZER_WORDS, PROMPT).tolist()
            stats, _ = answer(engine, GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=2))
        print(f"{PROMPT} tokens of a prompt: the first of the answer after {1e3 * stats.ttft_s:.0f} ms")
        peak = torch.cuda.max_memory_reserved() / 2**30
        print(f"peak of the allocator {peak:.2f} of {args.budget:g} GiB", flush=True)


def ask_all(engine: Engine, args: argparse.Namespace, what: str, **settings: Any) -> None:
    """All answers once more, with these settings, in one line; what the first pass of each kind needs is made
    before."""
    requests = [replace(request_of(number, args), **settings) for number in range(args.answers + 1)]
    answer(engine, requests[0])
    found = [answer(engine, request) for request in requests[1:]]
    drafted, accepted = (sum(getattr(stats, of) for stats, _ in found) for of in ("drafted", "accepted"))
    speeds = ", ".join(f"{speed:.1f}" for _, speed in found)
    rate = f", {accepted} of {drafted} drafted tokens accepted" if drafted else ""
    hits = np.mean([stats.hit_rate or 0 for stats, _ in found])
    print(f"{what}: {speeds} tok/s{rate}, hit rate {100 * hits:.0f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", action="store_true", help="the embedded model")
    parser.add_argument("--shape", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lanes", nargs="*", default=["auto", "vram+link"], choices=LANES)
    parser.add_argument("--draft", action="store_true", help="one of integers")
    parser.add_argument("--budget", type=float, default=16.0, help="GiB")
    parser.add_argument("--lengths", nargs="*", default=["0", "8", "32", "auto"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--answers", type=int, default=3)
    args = parser.parse_args()
    args.lengths = ["auto" if length == "auto" else int(length) for length in args.lengths]
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOCALMOE_HOME"] = f"{place}/home"  # where rounded drafts would stay
        folder = Path(place) / "model"
        folder.mkdir()
        began = time.perf_counter()
        if args.demo:
            size = write_demo(folder)
        else:
            size = write_model(folder, args.shape, args.layers, torch.device("cuda"))
        torch.cuda.empty_cache()
        print(f"{size:.1f} GB written in {time.perf_counter() - began:.0f} s", flush=True)
        for lanes in args.lanes:
            measure(folder, args, lanes)


if __name__ == "__main__":
    main()
