"""How far the CPU lane's sums move the target: greedy choices and distributions over many tokens, with
experts from VRAM and PCIe alone, and with all that are not in VRAM computed on the CPU, each beside float32.

python benchmarks/lane_exactness.py [--tokens 100000]

The embedded model (its real weights) reads its own evaluation text in windows; every token is one comparison.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch import Tensor

from localmoe.core.config import EngineConfig
from localmoe.engine import Engine
from localmoe.hub.local_models import resolve_model
from localmoe.model.device_runner import DeviceRunner
from localmoe.quant.calibration import read_calibration

WINDOW = 64
BLOCK = 960  # tokens of context that one piece of text gets


def divergence(exact: Tensor, other: Tensor) -> float:
    """Sum over rows of KL(exact || other), in nats, from logits."""
    p, q = torch.log_softmax(exact.double(), -1), torch.log_softmax(other.double(), -1)
    return float((p.exp() * (p - q)).sum())


def text_tokens(count: int) -> list[int]:
    """The built-in calibration text, as often as it takes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(resolve_model("demo").folder))
    ids: list[int] = []
    for text in read_calibration().documents:
        ids += tokenizer(text)["input_ids"]
    return (ids * (-(-count // len(ids))))[:count]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=30)
    args = parser.parse_args()
    ids = text_tokens(args.tokens)
    folder = str(resolve_model("demo").folder)
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    config = EngineConfig(device="cuda", context=1024, draft_length=0, lanes="vram+cpu")
    counts = {"tokens": 0, "differ": 0, "link_off": 0, "cpu_off": 0}
    sums = {"link": 0.0, "cpu": 0.0, "between": 0.0}
    with Engine.load("demo", config) as engine, torch.inference_mode():
        plan = engine.plan
        engine.resize(plan.total_bytes - plan.slot_bytes * (plan.num_slots - args.slots))
        runner = engine._loaded.runner
        assert isinstance(runner, DeviceRunner) and runner.passes.lane is not None
        lane = runner.passes.lane
        for at in range(0, len(ids) - BLOCK, BLOCK):
            block = ids[at : at + BLOCK]
            wanted = exact(torch.tensor([block], device="cuda")).logits[0].float()
            found = {}
            for name, allowed in (("link", False), ("cpu", True)):
                lane.allowed = allowed
                runner.sequence.truncate(0)
                rows = [
                    runner.run(block[i : i + WINDOW], "verify", last_only=False).clone()
                    for i in range(0, BLOCK, WINDOW)
                ]
                found[name] = torch.cat(rows)
            choice = {name: logits.argmax(-1) for name, logits in (*found.items(), ("exact", wanted))}
            counts["tokens"] += BLOCK
            counts["differ"] += int((choice["link"] != choice["cpu"]).sum())
            counts["link_off"] += int((choice["link"] != choice["exact"]).sum())
            counts["cpu_off"] += int((choice["cpu"] != choice["exact"]).sum())
            sums["link"] += divergence(wanted, found["link"])
            sums["cpu"] += divergence(wanted, found["cpu"])
            sums["between"] += divergence(found["link"], found["cpu"])
        done = lane.counters()
        assert not lane.failure and done.jobs, lane.failure
    n = counts["tokens"]
    print(
        f"{n} tokens, {done.jobs} jobs of the CPU: greedy choice differs between VRAM+link and with the CPU "
        f"for {counts['differ']} ({100 * counts['differ'] / n:.3f} %); from float32 for "
        f"{counts['link_off']} ({100 * counts['link_off'] / n:.3f} %) and {counts['cpu_off']} "
        f"({100 * counts['cpu_off'] / n:.3f} %)"
    )
    print(
        f"KL a token from float32: VRAM+link {sums['link'] / n:.3e}, with the CPU {sums['cpu'] / n:.3e}; "
        f"between the two {sums['between'] / n:.3e} nats"
    )


if __name__ == "__main__":
    main()
