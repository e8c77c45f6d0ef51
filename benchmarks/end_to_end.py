"""Decoding at the same memory: on-demand without and with drafting, moe-speq, and Hugging Face's offloading.

python benchmarks/end_to_end.py [--cases qwen1.5-moe-a2.7b:12,16 deepseek-v2-lite:12,16 phi-3.5-moe:32]
[--no-hf] [--answer 96] [--prompts 2]

Weights, routing and acceptance are synthetic (localmoe bench --shape), prompts are random tokens; times,
copies and hit rates are measured. Hugging Face: transformers with accelerate's dispatch of whole modules at
the same memory on the GPU, eager, random weights of the same shape. Every line says what is synthetic.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
import torch
import transformers
from synthetic_engine import simulate

from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.engine.benchmark import measure_setting
from localmoe.hardware.probe import probe_hardware
from localmoe.model.cached_pass import cached_pass
from localmoe.model.shapes import find_shape

CASES = ("qwen1.5-moe-a2.7b:12,16", "deepseek-v2-lite:12,16", "phi-3.5-moe:32")
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 256
ROUTING = "sticky:0.5"


def run_shape(
    name: str, budgets: list[int], acceptances: list[float], link: float, prompts: int, answer: int
) -> None:
    """All settings of one shape."""
    config = EngineConfig(device="cuda", context=2048, vram_budget_bytes=max(budgets) << 30, drafter="self")
    with Engine.load_shape(name, config, SyntheticSettings(parse_routing(ROUTING), 0.9, 0.9)) as engine:
        for gib in budgets:
            plan = engine.resize(gib << 30)
            for acceptance in acceptances:
                simulate(engine, ROUTING, acceptance, 0.9)
                print(
                    f"synthetic: {name}, {gib} GiB, acceptance {acceptance:g}, {ROUTING}, match 0.9: "
                    f"{plan.num_slots} slots = {100 * plan.resident_share:.0f} % of the experts, "
                    f"{'draft' if plan.drafting else 'NO DRAFT: ' + plan.drafting_reason}",
                    flush=True,
                )
                lengths = LENGTHS if plan.drafting else ()
                rows = (
                    [("on-demand", 0), ("on-demand", 4), ("moe-speq", 0)] if lengths else [("on-demand", 0)]
                )
                for policy, length in [*rows, *(("moe-speq", n) for n in lengths)]:
                    measure(engine, policy, length, link, prompts, answer)
    torch.cuda.empty_cache()


def measure(engine: Engine, policy: str, length: int, link: float, count: int, answer: int) -> None:
    """One line."""
    vocabulary = engine.footprint.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (count, PROMPT)).tolist()
    requests = [GenerationRequest(prompt_token_ids=tuple(p), max_new_tokens=answer) for p in prompts]
    row = measure_setting(engine, requests, policy, length)
    s = {key: value for key, value in row.summary().items() if isinstance(value, (int, float))}
    rate = s.get("h2d_bytes_per_s", 0.0)
    print(
        f"synthetic:   {policy:10s} draft length {length:2d}: {s.get('tokens_per_s', 0.0):6.1f} tok/s, "
        f"TPOT {1e3 * s.get('tpot_s', 0.0):6.1f} ms, hit rate {100 * s.get('hit_rate', 0.0):5.1f} %, "
        f"link {rate / 1e9:5.1f} GB/s = {100 * rate / link:3.0f} %, "
        f"drafts {1e3 * s.get('draft_s_per_step', 0.0):5.1f} ms, "
        f"verify {1e3 * s.get('verify_s_per_step', 0.0):6.1f} ms a step"
        f"{f', besides {1e3 * row.captured_s:.0f} ms of captures' if row.captured_s else ''}",
        flush=True,
    )


def run_hugging_face(name: str, gib: int) -> None:
    """transformers with modules dispatched to GPU and CPU by accelerate, moved over whenever they run."""
    import accelerate

    config = find_shape(name).config()
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    limit = {0: (gib << 30) - (1 << 30), "cpu": 110 << 30}  # a gibibyte for activations
    places = accelerate.infer_auto_device_map(
        model, limit, no_split_module_classes=model._no_split_modules, dtype=torch.bfloat16
    )
    for module_name, module in model.named_modules():
        home = next(
            (d for key, d in places.items() if module_name == key or module_name.startswith(key + ".")), "cpu"
        )
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                where = "cuda" if home == 0 else "cpu"
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=where)
                if where == "cuda":
                    value.normal_(0, 0.02)
                else:
                    value.fill_(0.01)
                module._parameters[key] = torch.nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    for module in model.modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cuda")
    accelerate.dispatch_model(model, places, main_device=0)
    ids = torch.randint(0, config.vocab_size, (1, 32), device="cuda")
    with torch.inference_mode():
        cache = transformers.DynamicCache(config=config)
        logits = cached_pass(model, ids, torch.arange(32, device="cuda")[None], cache)
        torch.cuda.synchronize()
        times = []
        for at in range(32, 35):
            started = time.perf_counter()
            token = logits[:, -1:].argmax(-1)
            logits = cached_pass(model, token, torch.tensor([[at]], device="cuda"), cache)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    on_gpu = sum(p.numel() for p in model.parameters() if p.is_cuda) / max(
        1, sum(p.numel() for p in model.parameters())
    )
    print(
        f"synthetic: {name}, {gib} GiB, Hugging Face device_map offload: {1 / min(times):.2f} tok/s, "
        f"TPOT {1e3 * min(times):.0f} ms, {100 * on_gpu:.0f} % of the weights on the GPU",
        flush=True,
    )
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    del model, logits, cache
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--acceptance", nargs="*", type=float, default=[0.9, 0.97])
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--only-hf", action="store_true")
    parser.add_argument("--answer", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2)
    args = parser.parse_args()
    gpu = probe_hardware().gpus[0]
    link = gpu.h2d_bytes_per_s or 1.0
    print(f"{gpu.name}, torch {torch.__version__}, link {link / 1e9:.1f} GB/s measured")
    for case in args.cases:
        name, _, sizes = case.partition(":")
        budgets = [int(size) for size in sizes.split(",")]
        if not args.only_hf:
            run_shape(name, budgets, args.acceptance, link, args.prompts, args.answer)
        if not args.no_hf:
            for gib in budgets:
                run_hugging_face(name, gib)


if __name__ == "__main__":
    main()
