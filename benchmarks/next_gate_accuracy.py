"""How often the next layer's router, applied to this layer's input, names experts that the next layer uses:
what the CPU lane fetches ahead by (model/device_foresight.py).

python benchmarks/next_gate_accuracy.py [--model demo] [--prompts 24] [--tokens 64]

The model answers greedily in float32, computed by transformers; the tokens of the answers count. Precision:
share of the named experts that are used, of all of them and of the likeliest one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.hub.catalogue import resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.next_gate import find_gates
from localmoe.model.skeleton import build_skeleton


def keeper(kept: list[Tensor]) -> Callable[..., None]:
    """A hook that keeps what a module is given, (T, H)."""

    def hook(module: Any, given: tuple[Tensor, ...]) -> None:
        kept.append(given[0].reshape(-1, given[0].shape[-1]))

    return hook


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    folder = resolve_model(args.model).folder
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    skeleton = replace(build_skeleton(Checkpoint.open(folder), torch.float32), model=model)
    gates = find_gates(skeleton)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs: list[Tensor] = []  # of each MoE block, in order
    for experts in skeleton.experts:
        model.get_submodule(experts.path.rpartition(".")[0]).register_forward_pre_hook(keeper(inputs))
    named, likeliest, tokens = torch.zeros(len(gates)), torch.zeros(len(gates)), 0
    for prompt in read_prompts(BUNDLED_PROMPTS, args.prompts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][-400:]])
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.tokens
        )
        inputs.clear()
        model(answer)
        for layer in range(1, len(gates)):
            gate = gates[layer]
            assert gate is not None, f"layer {layer} has no router that is known"
            weights, guessed = gate(inputs[layer - 1][ids.shape[1] :])
            _, used = gate(inputs[layer][ids.shape[1] :])
            right = (guessed[:, :, None] == used[:, None, :]).any(-1).float()  # (T, K)
            named[layer] += right.mean(1).sum()
            likeliest[layer] += right.gather(1, weights.argmax(-1, keepdim=True)).sum()
        tokens += answer.shape[1] - ids.shape[1]
    print(
        f"{args.model}: {tokens} tokens, {skeleton.experts_per_token} of {skeleton.num_experts} experts each"
    )
    for layer in range(1, len(gates)):
        print(
            f"layer {layer}: {100 * named[layer] / tokens:.1f} % of the named experts are used, "
            f"{100 * likeliest[layer] / tokens:.1f} % of the likeliest"
        )


if __name__ == "__main__":
    main()
