"""Trains the demo model on prepared tokens within a wall-clock limit.

The model is demo_model.py's, the batches are demo_batches.py's; this file holds the loss, the schedule and
the loop.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_batches import Batches, TokenFile
from demo_model import BALANCE_WEIGHT, DROPOUT, RouterTap, build_model, save
from torch import Tensor, nn
from transformers import Qwen2MoeForCausalLM

WARMUP = 0.02  # share of the run
LOG_STEPS = 50
LOOKS = 5  # at held-out loss, evenly over the run


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one training run is asked to do."""

    minutes: float
    max_steps: int
    rows: int
    learning_rate: float
    seed: int
    held_out_rows: int  # of each group, at each look at held-out loss


def token_losses(model: Qwen2MoeForCausalLM, inputs: Tensor, labels: Tensor, device: str) -> Tensor:
    """Cross-entropy of each position, (rows, tokens); 0 where the label is -100."""
    with torch.autocast(device, torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    flat = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view_as(labels)


def optimizer_of(model: nn.Module, learning_rate: float, device: str) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, not on embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device == "cuda")


def rate_at(done: float) -> float:
    """Share of the peak learning rate when this share of the run is done: linear up, cosine down to 1%."""
    if done < WARMUP:
        return 0.02 + 0.98 * done / WARMUP
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARMUP) / (1 - WARMUP))))


@torch.no_grad()
def held_out(model: Qwen2MoeForCausalLM, batches: Batches, max_rows: int, device: str) -> dict[str, float]:
    """Mean loss a token by group over the held-out token file, documents packed as in training."""
    model.eval()
    sums: dict[str, list[float]] = {}
    for group, inputs, labels in batches.groups(max_rows):
        loss = token_losses(model, inputs.to(device), labels.to(device), device)
        sums[group] = [float(loss.sum()), int((labels != -100).sum())]
    model.train()
    return {g: s / max(1, n) for g, (s, n) in sums.items()}


class Trainer:
    """One run: the model, its optimizer, and the log of what happened."""

    def __init__(self, data: Path, device: str, recipe: Recipe) -> None:
        torch.set_float32_matmul_precision("high")
        self.recipe, self.device = recipe, device
        self.model = build_model(recipe.seed, device).train()
        self.tap = RouterTap(self.model)
        self.optimizer = optimizer_of(self.model, recipe.learning_rate, device)
        self.valid = Batches(TokenFile(data, "valid"), recipe.rows, recipe.seed)
        self.stream = Batches(TokenFile(data, "train"), recipe.rows, recipe.seed).stream()
        self.log: list[dict[str, float]] = []
        self.looks: list[dict[str, object]] = []
        self.steps = self.tokens = 0
        self.seconds = 0.0

    def step(self, inputs: Tensor, labels: Tensor, done: float) -> dict[str, float | Tensor]:
        """One optimizer step at this share of the run; its losses, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * rate_at(done)
        self.tap.logits.clear()
        targets = labels.to(self.device, non_blocking=True)
        losses = token_losses(self.model, inputs.to(self.device, non_blocking=True), targets, self.device)
        loss = losses.sum() / (targets != -100).sum()
        balance = self.tap.balance_loss(self.model.config.num_experts_per_tok)
        (loss + BALANCE_WEIGHT * balance).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += labels.numel()
        return {"loss": loss.detach(), "balance": balance.detach(), "norm": norm}

    def look(self) -> dict[str, float]:
        """Held-out losses now, printed."""
        losses = held_out(self.model, self.valid, self.recipe.held_out_rows, self.device)
        print(f"step {self.steps}, held out", {g: round(v, 3) for g, v in losses.items()}, flush=True)
        return losses

    def run(self) -> None:
        """Steps until the time (or the number of steps) is used up."""
        inputs, labels = next(self.stream)  # waits for the packing thread: not part of the timed run
        start, limit = time.monotonic(), self.recipe.max_steps
        while True:
            self.seconds = time.monotonic() - start
            done = self.steps / limit if limit else self.seconds / (60 * self.recipe.minutes)
            if done >= 1:
                return
            result = self.step(inputs, labels, done)
            inputs, labels = next(self.stream)
            if self.steps % LOG_STEPS == 0:
                row = {"step": self.steps, "s": self.seconds, "tokens": self.tokens}
                row |= {k: float(v) for k, v in result.items()}
                self.log.append(row)
                print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            if done * LOOKS > len(self.looks) + 1:
                self.looks.append({"step": self.steps, "loss": self.look()})


def train(data: Path, out: Path, device: str, recipe: Recipe, pieces: int) -> None:
    """One run, then weights, configuration and training.json (recipe and losses) in `out`."""
    trainer = Trainer(data, device, recipe)
    trainer.run()
    final = trainer.look()
    save(trainer.model, out, pieces)
    facts = {
        "recipe": asdict(recipe),
        "seconds": trainer.seconds,
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "dropout": DROPOUT,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "final_held_out_loss": final,
        "held_out": trainer.looks,
        "log": trainer.log,
    }
    (out / "training.json").write_text(json.dumps(facts, indent=1))
