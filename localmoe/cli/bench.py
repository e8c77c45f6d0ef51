"""`localmoe bench`: the same prompts with several policies and draft lengths on one loaded engine, greedy.
Prints what was measured, and whether all settings gave the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from localmoe.cli.arguments import engine_config
from localmoe.cli.output import ProgressBars, note, number, percent, print_json, print_table
from localmoe.cli.prompts import BUNDLED_PROMPTS, Prompt, read_prompts
from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.prefetch.registry import POLICIES, check_policy

_COLUMNS = (
    "policy, draft length", "tok/s", "TPOT ms", "accepted", "expert match", "hit rate", "token hits", "late",
    "MB copied / token", "stall s",
)  # fmt: skip


@dataclass(slots=True)
class _Row:
    """One setting's totals over all prompts."""

    policy: str
    draft_length: DraftLength
    stats: list[GenerationStats] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def summary(self) -> dict[str, float | int | str | None]:
        """Ratios of sums over all prompts, so that long answers weigh more than short ones."""
        decode_tokens = sum(max(0, s.new_tokens - 1) for s in self.stats)
        decode_s = sum((s.tpot_s or 0.0) * max(0, s.new_tokens - 1) for s in self.stats)
        demands = sum(s.expert_demands for s in self.stats)
        return {
            "policy": self.policy,
            "draft_length": self.draft_length,
            "prompts": len(self.stats),
            "new_tokens": sum(s.new_tokens for s in self.stats),
            "tokens_per_s": _share(decode_tokens, decode_s),
            "tpot_s": _share(decode_s, decode_tokens),
            "acceptance_rate": _share(
                sum(s.accepted for s in self.stats), sum(s.drafted for s in self.stats)
            ),
            "expert_match_rate": _mean(self.stats, "expert_match_rate"),
            "hit_rate": _share(sum(s.hits for s in self.stats), demands),
            "token_hit_rate": _mean(self.stats, "token_hit_rate"),
            "late_rate": _share(sum(s.late for s in self.stats), demands),
            "h2d_bytes_per_token": _share(
                sum(s.h2d_bytes - s.prefill_h2d_bytes for s in self.stats), decode_tokens
            ),
            "stall_s": sum(s.stall_s for s in self.stats),
        }


def run_bench(args: argparse.Namespace) -> None:
    """Measure every policy x draft length.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    prompts = read_prompts(args.prompts or BUNDLED_PROMPTS, args.limit)
    policies = [check_policy(name) for name in args.policy or POLICIES]
    with ProgressBars() as progress:
        engine = Engine.load(args.model, engine_config(args, policy=policies[0]), progress=progress)
    with engine:
        settings = [(policy, length) for policy in policies for length in args.draft_lengths]
        rows = [_measure(engine, prompts, policy, length, args.max_new_tokens) for policy, length in settings]
        info, plan = engine.info(), engine.plan
        identical = all(row.tokens == rows[0].tokens for row in rows)
        if args.json:
            print_json(
                {
                    "model": info.name,
                    "device": info.device,
                    "dtype": info.dtype,
                    "draft": info.draft,
                    "link": info.link,
                    "plan": plan.as_dict(),
                    "identical_tokens": identical,
                    "rows": [row.summary() for row in rows],
                }
            )
            return
        title = (
            f"{info.name} on {info.device} ({info.dtype}), {len(prompts)} prompts, link: {info.link}, "
            f"{plan.num_slots} slots = {percent(plan.resident_share)} of the experts, draft: {info.draft}"
        )
        print_table(title, _COLUMNS, [_cells(row.summary()) for row in rows])
        print("All settings gave the same tokens." if identical else "THE SETTINGS GAVE DIFFERENT TOKENS.")


def _measure(
    engine: Engine, prompts: Sequence[Prompt], policy: str, draft_length: DraftLength, max_new_tokens: int
) -> _Row:
    row = _Row(policy, draft_length)
    note(f"{policy}, draft length {draft_length} ...")
    engine.reset()  # every setting starts with empty slots
    for prompt in prompts:
        request = GenerationRequest(
            messages=(Message("user", prompt.text),),
            max_new_tokens=max_new_tokens,
            draft_length=draft_length,
            policy=policy,
        )
        events = list(engine.stream(request))
        row.stats.append(events[-1].stats)
        row.tokens.append(tuple(token for event in events for token in event.token_ids))
    return row


def _cells(summary: dict[str, float | int | str | None]) -> list[str]:
    def value(name: str) -> float | None:
        entry = summary[name]
        return entry if isinstance(entry, (int, float)) else None

    tpot, copied = value("tpot_s"), value("h2d_bytes_per_token")
    return [
        f"{summary['policy']}, {summary['draft_length']}", number(value("tokens_per_s")),
        number(None if tpot is None else 1e3 * tpot, 2), percent(value("acceptance_rate")),
        percent(value("expert_match_rate")), percent(value("hit_rate")), percent(value("token_hit_rate")),
        percent(value("late_rate")), number(None if copied is None else copied / 1e6, 2),
        number(value("stall_s"), 2),
    ]  # fmt: skip


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(stats: Sequence[GenerationStats], name: str) -> float | None:
    values = [value for value in (getattr(entry, name) for entry in stats) if value is not None]
    return sum(values) / len(values) if values else None
