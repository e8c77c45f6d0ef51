"""How often draft and target of the embedded model agree on a sampled token: by rejection sampling, which is
the most that any rule reaches (one less the distributions' distance), and by choosing with the same noise
(kernels/choices.py). Computed from both distributions at every token of the target's own answers.

python benchmarks/sampled_acceptance.py [--answers 4] [--tokens 60]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from localmoe.core.config import EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.speculative.sampling import TokenSampler

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.6, top-p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "temperature 0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 1": {"temperature": 1.0},
}


def by_noise(p: Tensor, q: Tensor) -> float:
    """sum_v 1 / sum_w max(p_w / p_v, q_w / q_v), with one sort instead of all pairs."""
    both = (p > 0) & (q > 0)
    order = torch.argsort(q / p.clamp(min=1e-300) + torch.where(p == 0, torch.inf, 0.0))
    p, q, both = p[order], q[order], both[order]
    before, after = p.cumsum(0), q.flip(0).cumsum(0).flip(0) - q  # of ratios up to v's, and above it
    return float((1 / (before / p + after / q))[both].sum())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=60)
    args = parser.parse_args()
    questions = [prompt.text for prompt in read_prompts(BUNDLED_PROMPTS, args.answers)]
    with Engine.load("demo", EngineConfig(device="cpu", context=1024)) as engine, torch.inference_mode():
        runner = engine._loaded.runner
        for name, options in SETTINGS.items():
            most = noise = count = 0.0
            for seed, question in enumerate(questions):
                config = SamplingConfig(**options, seed=seed)
                request = GenerationRequest(
                    messages=(Message("user", question),), max_new_tokens=args.tokens, draft_length=0,
                    sampling=config,
                )  # fmt: skip
                text: list[int] = []
                for event in engine.stream(request):
                    text += [*event.prompt_token_ids, *event.token_ids]
                sampler, first = TokenSampler(config), len(text) - event.stats.new_tokens
                runner.sequence.truncate(0)
                runner.run(text[: first - 1], "prefill", last_only=True)
                for at in range(first - 1, len(text) - 1):
                    runner.begin_draft_token(0)
                    draft = runner.run([text[at]], "draft", last_only=True)[0]
                    q = sampler.distribution(draft, text[: at + 1]).double()
                    runner.sequence.truncate(at)
                    target = runner.run([text[at]], "verify", last_only=True)[0]
                    p = sampler.distribution(target, text[: at + 1]).double()
                    most += float(torch.minimum(p, q).sum())
                    noise += by_noise(p, q)
                    count += 1
            print(
                f"{name}: {count:.0f} tokens, rejection sampling {100 * most / count:.1f} %, the same noise "
                f"{100 * noise / count:.1f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
