"""How far the CPU lane's sums move the target: greedy choices and distributions over many tokens, with
experts from VRAM and PCIe alone, and with all that are not in VRAM computed on the CPU, each beside float32.

python benchmarks/lane_exactness.py [--tokens 100000] [--mxfp4]

The embedded model (its real weights) reads its own evaluation text in windows; every token is one comparison.
With --mxfp4 its experts are rounded to MXFP4 first, for all three alike.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from mxfp4 import write_demo
from torch import Tensor

from localmoe.core.config import EngineConfig
from localmoe.core.types import ExpertKey
from localmoe.engine import Engine
from localmoe.engine.sources import CheckpointSource
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


def copy_experts(folder: str, model: transformers.PreTrainedModel) -> None:
    """A folder's experts, as 16-bit weights, into a model of transformers."""
    source = CheckpointSource.open(folder)
    skeleton = source.skeleton(source.stored_dtype)
    store = source.load_weights(skeleton, torch.device("cpu"), progress=None, cancel=None)
    for layer, experts in enumerate(skeleton.experts):
        module = model.get_submodule(experts.path)
        for expert in range(skeleton.num_experts):
            gate_up, down = store.weights(ExpertKey(layer, expert))
            module.gate_up_proj.data[expert].copy_(gate_up)
            module.down_proj.data[expert].copy_(down)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=30)
    parser.add_argument("--mxfp4", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if args.mxfp4:
            write_demo(Path(place))
        compare(args, place if args.mxfp4 else str(resolve_model("demo").folder))


def compare(args: argparse.Namespace, folder: str) -> None:
    """Print what both ways of the model in a folder make of all tokens."""
    ids = text_tokens(args.tokens)
    demo = str(resolve_model("demo").folder)
    exact = transformers.AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()
    copy_experts(folder, exact)
    exact.cuda()
    config = EngineConfig(device="cuda", context=1024, draft_length=0, lanes="vram+cpu")
    counts = {"tokens": 0, "differ": 0, "link_off": 0, "cpu_off": 0}
    sums = {"link": 0.0, "cpu": 0.0, "between": 0.0}
    with Engine.load(folder, config) as engine, torch.inference_mode():
        plan = engine.plan
        assert engine.footprint.keeps_mxfp4 == args.mxfp4
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
