"""Decoding by all lanes (VRAM, PCIe, CPU) beside two of them, each figure beside what the lanes' rates allow.

python benchmarks/lanes.py [--shape qwen1.5-moe-a2.7b] [--budgets 5 16] [--routing uniform popular]
[--lengths 0] [--complete on off] [--foresight on cpu off]

Weights, routing and acceptance are synthetic (localmoe bench --shape), prompts are random tokens; times,
bytes and hit rates are measured. The limit is the experts that were not in VRAM, in bytes, over the rates
of link and CPU measured alone in the same run, plus what is read from VRAM over its bandwidth; nothing for
kernels.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from link_reads import host_data, plain_rate
from steps import read_bandwidth
from synthetic_engine import simulate

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest, parse_draft_length
from localmoe.core.errors import BudgetError
from localmoe.core.stats import GenerationStats
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.experts.cpu_lane import CpuLane
from localmoe.experts.record_store import RecordStore
from localmoe.hardware.probe import probe_hardware
from localmoe.kernels.rests import COPIED, WORD_BYTES
from localmoe.model.device_lane import DeviceLane
from localmoe.model.device_runner import DeviceRunner

COPIED_BYTES = 24 << 30  # while both lanes are busy


def answer(
    engine: Engine, length: DraftLength, strict: bool, tokens: int, prompt: int = 80
) -> tuple[GenerationStats, float]:
    """Statistics of the second of two answers, and the seconds of it in which passes were captured; the first
    one captures most of them and fills slots."""
    for seed in (0, 1):
        ids = np.random.default_rng(seed).integers(0, engine.footprint.vocab_size, prompt).tolist()
        request = GenerationRequest(
            prompt_token_ids=tuple(ids), max_new_tokens=tokens, draft_length=length, strict=strict
        )
        before = engine.live.capture_s()
        for event in engine.stream(request):
            stats = event.stats
    return stats, engine.live.capture_s() - before


_rest_us = DeviceLane.rest_us


def complete(kind: str) -> None:
    """Whether passes complete experts that the CPU computes a part of: "on" or "off"."""
    setattr(DeviceLane, "rest_us", _rest_us if kind == "on" else lambda lane, worth: 0.0)  # noqa: B010


def slots_of(engine: Engine) -> str:
    """What changes of slots were worth, and how much was copied to complete experts, since the load."""
    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner)
    memory, lane = runner.passes.memory, runner.passes.lane
    if lane is None:
        return ""
    rest = lane.block.view(0).rest
    copied = 0 if rest is None else int(rest.words[COPIED]) * WORD_BYTES
    return (
        f"a slot's change is worth {memory.worth.gain:.2f} uses, a rest may take "
        f"{lane.rest_us(memory.worth):.0f} us, {copied / 1e9:.2f} GB of rests since the load"
    )


def report(engine: Engine, length: DraftLength, strict: bool, rates: dict[str, float], tokens: int) -> None:
    """One line."""
    s, captures_s = answer(engine, length, strict, tokens)
    footprint, decoded = engine.footprint, max(1, s.new_tokens - 1)
    seconds = (s.tpot_s or 0.0) * decoded
    link_bytes = s.h2d_bytes - s.prefill_h2d_bytes
    shared = footprint.shared_bytes - 2 * footprint.vocab_size * footprint.hidden_size
    shared -= footprint.packed_away_bytes
    resident = s.hits + s.late
    vram = s.steps * shared + resident * footprint.expert_bytes
    drafts = s.drafted * (
        shared + footprint.num_layers * footprint.experts_per_token * footprint.draft_expert_bytes
    )
    both = rates["link"] + (0.0 if strict else rates["cpu"])
    limit = (link_bytes + s.cpu_bytes) / both + (vram + drafts) / rates["vram"]
    lanes = "VRAM+link    " if strict else "VRAM+link+CPU"
    together = (link_bytes + s.cpu_bytes) / max(seconds, 1e-9)
    print(
        f"synthetic: {lanes} draft length {length!s:>4}: {s.tokens_per_s or 0:6.1f} tok/s, limit "
        f"{decoded / limit:6.1f}; hit rate {100 * (s.hit_rate or 0):5.1f} %, CPU {s.computed} + link "
        f"{s.misses} of {s.expert_demands} experts; link {link_bytes / seconds / 1e9:5.1f} GB/s = "
        f"{100 * link_bytes / seconds / rates['link']:2.0f} % of copies', "
        f"{100 * link_bytes / seconds / rates['kernels over the link']:2.0f} % of kernels' rate, CPU "
        f"{s.cpu_bytes / seconds / 1e9:5.1f} (busy {100 * s.cpu_busy_s / seconds:3.0f} %, "
        f"{s.cpu_bytes / max(s.cpu_busy_s, 1e-9) / 1e9:5.1f} while busy, "
        f"{100 * s.cpu_ahead_bytes / max(s.cpu_bytes, 1):2.0f} % fetched ahead), together "
        f"{100 * together / both:3.0f} % of their rates; GPU waited for {s.cpu_waited} of {s.cpu_jobs} jobs; "
        f"drafts {1e3 * s.draft_s / s.steps:.1f}, verify {1e3 * s.verify_s / s.steps:.2f} ms a step, "
        f"{1e3 * (s.stall_s or 0.0) / s.steps:.2f} of it waiting for experts; "
        f"captures took {1e3 * captures_s:.0f} of {1e3 * seconds:.0f} ms; {slots_of(engine)}",
        flush=True,
    )


class Foreseen:
    """Which of what is done ahead is left in: "on", all of it; "cpu", nothing is copied ahead over the link;
    "off", nothing is foretold to the CPU either."""

    def __init__(self, engine: Engine) -> None:
        runner = engine._loaded.runner
        assert isinstance(runner, DeviceRunner)
        self._runner, self._kind = runner, "on"
        self._foresight = runner.passes.foresight
        self._stage = None if self._foresight is None else self._foresight._stage

    def set(self, kind: str) -> None:
        """Once it is another one, passes are captured anew."""
        if kind == self._kind or self._foresight is None:
            return
        self._kind = kind
        self._runner.passes.foresight = None if kind == "off" else self._foresight
        self._foresight._stage = self._stage if kind == "on" else None
        self._runner.forget_graphs()
        print(f"synthetic: looking ahead: {kind}")


def prompt_speed(engine: Engine, length: int) -> None:
    """Time to the first token of fresh prompts, the first ones of which fill slots."""
    seconds = []
    for seed in range(8):
        ids = np.random.default_rng(seed).integers(0, engine.footprint.vocab_size, length).tolist()
        request = GenerationRequest(prompt_token_ids=tuple(ids), max_new_tokens=1, draft_length=0)
        for event in engine.stream(request):
            seconds.append(event.stats.ttft_s)
    print(f"synthetic: prompt of {length} tokens: {length / min(seconds):.0f} tok/s ({seconds})", flush=True)


def draft_alone(engine: Engine, tokens: int) -> None:
    """Approximate answers, by the draft."""
    ids = tuple(np.random.default_rng(0).integers(0, engine.footprint.vocab_size, 80).tolist())
    request = GenerationRequest(prompt_token_ids=ids, max_new_tokens=tokens, draft_only=True)
    for _ in range(2):
        for event in engine.stream(request):
            stats = event.stats
    print(f"synthetic: draft alone (approximate): {stats.tokens_per_s or 0:.1f} tok/s", flush=True)


def measured_rates(engine: Engine) -> dict[str, float]:
    """Bytes a second of each lane alone; of the link, what copies reach, and what kernels that read it do."""
    runner = engine._loaded.runner
    assert isinstance(runner, DeviceRunner)
    link = probe_hardware().gpus[0].h2d_bytes_per_s or 1.0
    rates = {
        "link": link,
        "kernels over the link": plain_rate(host_data()),
        "vram": read_bandwidth(),
        "cpu": 0.0,
    }
    lane = runner.passes.lane
    if lane is not None:
        cpu, store = lane.lane, engine._loaded.store
        x = torch.full((1, cpu.layout.hidden), 0.5, dtype=store.dtype)
        count = min(store.num_experts, 16)
        for _ in range(2):  # threads that were at rest come late to the first jobs
            before = cpu.counters()
            for layer in range(store.num_layers):
                cpu.compute(layer, x, [(e, [0], store.layouts[layer].inner) for e in range(count)])
            after = cpu.counters()
        lane.block.restart(int(cpu.mailbox.posted[0]))
        rates["cpu"] = (after.num_bytes - before.num_bytes) / (after.busy_s - before.busy_s)
        print(f"measured at load: {lane.measured}; {engine.info().lanes}")
        at_once(cpu, store)
        lane.block.restart(int(cpu.mailbox.posted[0]))
    print("synthetic: rates alone: " + ", ".join(f"{k} {v / 1e9:.1f} GB/s" for k, v in rates.items()))
    return rates


def at_once(cpu: CpuLane, store: RecordStore) -> None:
    """Bytes a second of link and CPU while both are kept busy with nothing else: both read one memory."""
    keys = [ExpertKey(layer, e) for layer in range(store.num_layers) for e in range(store.num_experts)]
    keys = keys[: 1 + COPIED_BYTES // store.record(keys[0]).nbytes]
    target = torch.empty_like(store.record(keys[0]), device="cuda")
    x = torch.full((1, cpu.layout.hidden), 0.5, dtype=store.dtype)
    count, stream = min(store.num_experts, 16), torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = cpu.counters()
    with torch.cuda.stream(stream):
        begin.record()
        for key in keys:
            target.copy_(store.record(key), non_blocking=True)
        end.record()
    layer = store.num_layers  # other experts than those that are copied first
    while not end.query():
        layer = (layer - 1) % store.num_layers
        cpu.compute(layer, x, [(e, [0], store.layouts[layer].inner) for e in range(count)])
    after = cpu.counters()
    link = len(keys) * target.nbytes / begin.elapsed_time(end) * 1e3
    cpu_rate = (after.num_bytes - before.num_bytes) / (after.busy_s - before.busy_s)
    print(f"synthetic: rates at once: link {link / 1e9:.1f} GB/s, cpu {cpu_rate / 1e9:.1f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen1.5-moe-a2.7b")
    parser.add_argument("--budgets", type=float, nargs="*", default=[16.0, 5.0])
    parser.add_argument("--lengths", nargs="*", default=["0"])
    parser.add_argument("--routing", nargs="*", default=["uniform"])
    parser.add_argument("--acceptance", type=float, default=0.97)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lanes", default="auto")
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--no-strict", action="store_true")
    parser.add_argument("--no-packing", action="store_true", help="experts in 16 bits")
    parser.add_argument("--foresight", nargs="*", default=["on"], choices=["on", "cpu", "off"])
    parser.add_argument("--complete", nargs="*", default=["on"], choices=["on", "off"])
    args = parser.parse_args()
    lengths = [parse_draft_length(text) for text in args.lengths]
    settings = SyntheticSettings(parse_routing("uniform"), args.acceptance, 0.9)
    config = EngineConfig(
        device="cuda", context=args.context, vram_budget_bytes=int(args.budgets[0] * 2**30), lanes=args.lanes,
        cpu_threads=args.threads, draft_length="auto" if any(lengths) else 0, drafter="self",
        pack_experts=not args.no_packing,
    )  # fmt: skip
    started = time.perf_counter()
    with Engine.load_shape(args.shape, config, settings) as engine:
        print(f"synthetic: {args.shape}, ready in {time.perf_counter() - started:.1f} s")
        rates, foreseen = measured_rates(engine), Foreseen(engine)
        for gib in args.budgets:
            try:
                plan = engine.resize(int(gib * 2**30))
            except BudgetError as error:
                print(f"synthetic: {gib:g} GiB: {error}")
                continue
            print(f"synthetic: {gib:g} GiB, {100 * plan.resident_share:.0f} % of the experts in slots")
            if args.prompt:
                prompt_speed(engine, args.prompt)
            if plan.drafting:
                draft_alone(engine, args.tokens)
            for routing in args.routing:
                simulate(engine, routing, args.acceptance, 0.9)
                print(f"synthetic: routing {routing}")
                for length in lengths if plan.drafting else [n for n in lengths if n == 0]:
                    for strict in (True, False) if not args.no_strict else (False,):
                        for ahead in args.foresight:
                            foreseen.set(ahead)
                            for kind in args.complete if not strict else ("on",):
                                complete(kind)
                                if kind == "off":
                                    print("synthetic: experts that are split are not completed")
                                report(engine, length, strict, rates, args.tokens)
        print(engine.info().lanes)


if __name__ == "__main__":
    main()
