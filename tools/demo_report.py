"""Writes the demo model's card: held-out perplexity, routing balance, transcripts, data and licences.

Every figure is measured here by plain transformers on the saved model or read from the training log; the
prose is demo_card.md's.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_batches import TokenFile
from demo_lists import read_plots
from demo_sources import SOURCES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

GROUP_TOKENS = 5_000  # held-out tokens scored for each group
NO_LOSS = 1 << 15
CONVERSATION = ["hello", "who are you", "tell me a story about a fox", "what is 3 + 4"]
SECOND = [
    "Hi, my name is Robert",
    "what can you do?",
    "Tell me a story about a robot",
    "what is 12 - 5?",
    "I like music",
    "what is my name?",
    "thank you, bye",
]


LIMITS = ["Who wrote Hamlet?", "Write a program that sorts a list", "Tell me about the moons of Jupiter"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Use of a layer's experts: entropy over log E, busiest and idlest as multiples of an even share."""

    entropy: float
    busiest: float
    idlest: float


@torch.no_grad()
def perplexities(model: torch.nn.Module, file: TokenFile) -> dict[str, tuple[float, int]]:
    """group -> (perplexity, tokens scored), each document on its own, over its tokens that carry loss."""
    names = [row["group"] for row in file.rows]
    sums: dict[str, tuple[float, int]] = {}
    for index, source in enumerate(file.sources):
        group = names[source]
        nll, count = sums.get(group, (0.0, 0))
        if count >= GROUP_TOKENS:
            continue
        entries = torch.from_numpy(file.document(index).astype("int64"))
        ids, scored = entries & (NO_LOSS - 1), entries[1:] < NO_LOSS
        logits = model(ids[None, :-1]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[scored]
        sums[group] = (nll + float(losses.sum()), count + int(scored.sum()))
    return {group: (math.exp(nll / count), count) for group, (nll, count) in sums.items()}


@torch.no_grad()
def routing(model: torch.nn.Module, rows: list[Tensor]) -> list[Routing]:
    """How evenly each layer's experts are chosen over these token rows."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)

    def keep(layer: int, chosen: Tensor) -> None:
        counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, a, out, number=number: keep(number, out[2]))
        for number, layer in enumerate(model.model.layers)
    ]
    for row in rows:
        model(row[None])
    for hook in hooks:
        hook.remove()
    shares = counts / counts.sum(1, keepdim=True)
    entropy = torch.special.entr(shares).sum(1) / math.log(config.num_experts)
    even = shares * config.num_experts
    return [Routing(float(e), float(s.max()), float(s.min())) for e, s in zip(entropy, even, strict=True)]


@torch.no_grad()
def converse(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    lines: list[str],
    temperature: float,
    seed: int,
) -> list[str]:
    """The model's answers to the user's lines in one conversation; temperature 0 is greedy."""
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature else {"do_sample": False}
    )
    sampling |= {} if temperature else {"temperature": None, "top_p": None}
    messages: list[dict[str, str]] = []
    answers = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, max_new_tokens=300, top_k=0 if temperature else None, **sampling)
        answers.append(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@torch.no_grad()
def one_digit_sums(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """(right, asked) over `what is a + b` and, for a >= b, `what is a - b`, one-digit numbers, greedy."""
    right = asked = 0
    for a in range(10):
        for op, value, b in [("+", a + b, b) for b in range(10)] + [("-", a - b, b) for b in range(a + 1)]:
            answer = converse(model, tokenizer, [f"what is {a} {op} {b}"], 0.0, 0)[0]
            asked += 1
            right += answer.rstrip(".").split()[-1] == str(value)
    return right, asked


def transcript(lines: list[str], answers: list[str]) -> str:
    """A conversation as a block quote."""
    turns = [f"**User:** {u}\n\n**Model:** {a}" for u, a in zip(lines, answers, strict=True)]
    return "\n>\n".join("> " + t.replace("\n", "\n> ") for t in turns)


def data_table(rows: list[dict[str, int]]) -> str:
    """One line a source: what, licence, how much there was, how much of training it was."""
    total = sum(source.share for source in SOURCES)
    lines = ["| source | licence | tokens | share of training |", "|---|---|---|---|"]
    for source, row in zip(SOURCES, rows, strict=True):
        tokens, share = f"{row['train_tokens']:,}", f"{source.share / total:.1%}"
        lines.append(f"| {source.title} | {source.licence} | {tokens} | {share} |")
    return "\n".join(lines)


def training_facts(out: Path, rows: list[dict[str, int]]) -> dict[str, str]:
    """What the card says of training, from the log."""
    log = json.loads((out / "training.json").read_text())
    return {
        "tokens": f"{log['tokens']:,}",
        "steps": f"{log['steps']:,}",
        "seconds": f"{log['seconds']:.0f}",
        "hardware": log["device"],
        "torch": log["torch"],
        "rate": str(log["recipe"]["learning_rate"]),
        "rows": str(log["recipe"]["rows"]),
        "dropout": str(log["dropout"]),
        "unique": f"{sum(row['train_tokens'] for row in rows):,}",
        "plots": str(sum(map(len, read_plots("demo_plots.txt").values()))),
    }


def measured(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, valid: TokenFile) -> dict[str, str]:
    """What the card says of the model, measured on it."""
    every = range(0, len(valid.sources), 40)
    texts = [torch.from_numpy(valid.document(i).astype("int64") & (NO_LOSS - 1)) for i in every]
    layers = enumerate(routing(model, texts))
    groups = perplexities(model, valid).items()
    right, asked = one_digit_sums(model, tokenizer)
    talks = {"greedy": (CONVERSATION, 0.0, 0), "sampled": (CONVERSATION, 0.7, 1), "second": (SECOND, 0.7, 2)}
    talks["limits"] = (LIMITS, 0.0, 0)
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "perplexity": "\n".join(f"| {g} | {p:.2f} | {n:,} |" for g, (p, n) in groups),
        "routing": "\n".join(
            f"| {i} | {r.entropy:.4f} | {r.busiest:.2f} | {r.idlest:.2f} |" for i, r in layers
        ),
        "routing_tokens": f"{sum(map(len, texts)):,}",
        "right": str(right),
        "asked": str(asked),
    } | {name: transcript(t[0], converse(model, tokenizer, *t)) for name, t in talks.items()}


def report(data: Path, out: Path, device: str) -> None:
    """Measures the model in `out` and writes its README.md and ATTRIBUTION.md."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval().to(device)
    valid = TokenFile(data, "valid")
    facts = measured(model, tokenizer, valid) | training_facts(out, valid.rows)
    template = (Path(__file__).parent / "demo_card.md").read_text(encoding="utf-8")
    card = template.format(**facts, data=data_table(valid.rows))
    for name, text in (("README.md", card), ("ATTRIBUTION.md", (data / "ATTRIBUTION.md").read_text("utf-8"))):
        (out / f"{name}.new").write_text(text, encoding="utf-8")
        (out / f"{name}.new").rename(out / name)
