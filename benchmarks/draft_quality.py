"""How near drafts of the embedded model come to it, by method and bits: a table.

python benchmarks/draft_quality.py [--answers 60] [--tokens 64] [--calibration-tokens 65536]

The model answers prompts that no draft was calibrated on, greedily; every draft then sees the same texts.
Accepted: share of the answers' tokens that are the draft's first choice too (greedy acceptance of one
drafted token).
Overlap: sum of min(p, q) over the vocabulary, the acceptance of speculative sampling at temperature 1.
Experts: share of (token, layer) whose top-k sets are equal. Weights are dequantised to float32 and computed
by transformers, so kernels play no part. NF4 needs bitsandbytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from localmoe.core.draft_config import DraftSettings, GptqSettings, nf4_settings
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.engine.drafting import build_draft
from localmoe.hub.catalogue import demo_folder
from localmoe.kernels.codes import dequantize, quantize_rtn
from localmoe.quant.draft_checkpoint import DraftCheckpoint

Fill = Callable[
    [int, int, Tensor, Tensor], tuple[Tensor, Tensor]
]  # layer, expert, gate_up, down -> quantised


@dataclass(slots=True)
class Scores:
    """Sums over the answers' tokens."""

    tokens: int = 0
    accepted: float = 0.0
    overlap: float = 0.0
    experts: float = 0.0

    def row(self) -> str:
        """Shares."""
        n = self.tokens
        return f"{self.accepted / n:.4f} | {self.overlap / n:.4f} | {self.experts / n:.4f}"


class Subject:
    """The embedded model in transformers, whose experts' weights can be replaced."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            demo_folder(), dtype=torch.float32
        ).eval()
        self.experts = [layer.mlp.experts for layer in self.model.model.layers]
        self._original = [(e.gate_up_proj.data.clone(), e.down_proj.data.clone()) for e in self.experts]
        self._routes: list[Tensor] = []
        for experts in self.experts:
            experts.register_forward_pre_hook(
                lambda module, args: self._routes.append(args[1].sort(-1).values)
            )

    @torch.inference_mode()
    def fill(self, fill: Fill | None) -> None:
        """Put quantised weights in the place of the original ones; None: the original ones."""
        for layer, (experts, (gate_up, down)) in enumerate(zip(self.experts, self._original, strict=True)):
            for e in range(gate_up.shape[0]):
                new = (gate_up[e], down[e]) if fill is None else fill(layer, e, gate_up[e], down[e])
                experts.gate_up_proj.data[e], experts.down_proj.data[e] = new

    @torch.inference_mode()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (T, V) and routes (L, T, K) of one text."""
        self._routes.clear()
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        return logits.log_softmax(-1), torch.stack(self._routes)


def answers(subject: Subject, count: int, tokens: int) -> list[tuple[Tensor, int]]:
    """(text, length of the prompt) of greedy answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder())
    found = []
    for prompt in read_prompts(BUNDLED_PROMPTS, count):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][-400:])
        with torch.inference_mode():
            mask = torch.ones_like(ids)[None]
            out = subject.model.generate(
                ids[None], attention_mask=mask, do_sample=False, max_new_tokens=tokens
            )[0]
        found.append((out, len(ids)))
    return found


def compare(
    subject: Subject, texts: list[tuple[Tensor, int]], reference: list[tuple[Tensor, Tensor]]
) -> Scores:
    """The draft that is filled in against the target's reading of the same texts."""
    scores = Scores()
    for (ids, prompt), (target, routes) in zip(texts, reference, strict=True):
        draft, draft_routes = subject.read(ids)
        rows = slice(prompt - 1, len(ids) - 1)
        scores.tokens += len(ids) - prompt
        scores.accepted += float((draft[rows].argmax(-1) == target[rows].argmax(-1)).sum())
        scores.overlap += float(torch.minimum(draft[rows].exp(), target[rows].exp()).sum())
        scores.experts += float((draft_routes == routes).all(-1)[:, rows].float().mean(0).sum())
    return scores


def drafts(args: argparse.Namespace, work: Path) -> Iterator[tuple[str, Fill, float]]:
    """Name, weights, and seconds that the build took."""
    for bits in (8, 4, 3, 2):
        yield f"RTN, {bits} bits", rounded(bits), 0.0
        settings = GptqSettings(bits=bits, num_tokens=args.calibration_tokens)
        variants = {f"GPTQ, {bits} bits": settings}
        if bits == 4:
            once = replace(settings, gate_weighted=False)
            variants["GPTQ, 4 bits, every token once"] = once
            variants["GPTQ, 4 bits, every token once, no act-order"] = replace(once, act_order=False)
        for name, variant in variants.items():
            started = time.perf_counter()
            folder = build_draft(
                "demo", work / str(hash(name)), DraftSettings("gptq", variant, device=args.device)
            )
            yield name, read(folder), time.perf_counter() - started
        if bits == 4 and importlib.util.find_spec("bitsandbytes"):
            started = time.perf_counter()
            folder = build_draft("demo", work / "nf4", nf4_settings())
            yield "NF4 (bitsandbytes)", read(folder), time.perf_counter() - started


def rounded(bits: int) -> Fill:
    def fill(layer: int, expert: int, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (dequantize(quantize_rtn(w, bits, 128), torch.float32) for w in (gate_up, down))
        return a, b

    return fill


def read(folder: Path) -> Fill:
    draft = DraftCheckpoint.open(folder)
    naming, cache = draft.naming(), {}

    def fill(layer: int, expert: int, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in cache:
            shape = (gate_up.shape[0] // 2, gate_up.shape[1])
            cache[layer] = list(draft.reader(naming).layer(layer, 16, shape))
        gate, up, below = (dequantize(matrix, torch.float32) for matrix in cache[layer][expert])
        return torch.cat([gate, up]), below

    return fill


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--calibration-tokens", type=int, default=65536)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    subject = Subject()
    texts = answers(subject, args.answers, args.tokens)
    reference = [subject.read(ids) for ids, _ in texts]
    print(f"{len(texts)} answers, {sum(len(ids) - n for ids, n in texts)} tokens, torch {torch.__version__}")
    print("| draft | accepted | overlap | experts | seconds to build |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, fill, seconds in drafts(args, Path(folder)):
            subject.fill(fill)
            scores = compare(subject, texts, reference)
            print(
                f"| {name} | {scores.row()} | {seconds:.0f} |"
                if seconds
                else f"| {name} | {scores.row()} | - |",
                flush=True,
            )


if __name__ == "__main__":
    main()
