"""`localmoe bench`: the same prompts with several policies and draft lengths on one loaded engine, greedy.
Prints what was measured, and whether all settings gave the same tokens.

With `--shape` the weights are random and the prompts are random tokens; every line of what is printed then
says that it is synthetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from localmoe.cli.bench_report import COLUMNS, cells
from localmoe.cli.load_options import engine_config
from localmoe.cli.output import ProgressBars, note, percent, print_json, print_table
from localmoe.core.config import DraftLength, GenerationRequest
from localmoe.core.errors import ConfigError, ContextLengthError
from localmoe.core.plan_types import MemoryPlan
from localmoe.core.prompts import BUNDLED_PROMPTS, Prompt, read_prompts
from localmoe.core.types import Message
from localmoe.engine import Engine, EngineInfo
from localmoe.engine.bench_row import Row
from localmoe.engine.benchmark import measure_setting, same_tokens
from localmoe.prefetch.registry import POLICIES, check_policy

SHAPE_PROMPTS = 4
SHAPE_PROMPT_TOKENS = 64


def run_bench(args: argparse.Namespace) -> None:
    """Measure every policy x draft length.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    policies = [check_policy(name) for name in args.policy or POLICIES]
    _check_amount(args)
    prompts = read_prompts(args.prompts or BUNDLED_PROMPTS, args.limit) if args.shape is None else []
    config = engine_config(args, policy=policies[0])
    with ProgressBars() as progress:
        if args.shape is None:
            engine = Engine.load(args.model, config, progress=progress)
        else:
            engine = Engine.load_shape(args.shape, config, args.synthetic, progress=progress)
    with engine:
        if prompts:
            requests = _text_requests(args, engine, prompts)
        else:
            requests = _random_requests(args, engine.footprint.vocab_size)
        loaded = engine.info(), engine.plan  # auto may lay the draft aside
        settings = [(policy, length) for policy in policies for length in _lengths(args, engine)]
        rows = [_measure(engine, requests, setting, _label(args)) for setting in settings]
        (_print_json if args.json else _print_table)(args, *loaded, rows)
    if prompts and len(requests) < len(prompts):
        raise ConfigError(_left_out(len(prompts) - len(requests), len(prompts)))


def _lengths(args: argparse.Namespace, engine: Engine) -> Sequence[DraftLength]:
    """Those that can be measured: where the engine took no draft of its own accord, other rows are left out,
    unless there would be none."""
    lengths: Sequence[DraftLength] = args.draft_lengths
    drafts = engine.plan.drafting or args.drafter == "prompt-lookup"
    left = [length for length in lengths if drafts or length in (0, "auto")]
    if not left or len(left) == len(lengths):
        return lengths
    reason = engine.plan.drafting_reason
    note(f"{_label(args)}No draft is loaded ({reason}): rows with one are left out; --draft-length loads it.")
    return left


def _label(args: argparse.Namespace) -> str:
    """What every line of a run on random weights begins with."""
    return "" if args.synthetic is None else "synthetic: "


def _check_amount(args: argparse.Namespace) -> None:
    """Said before weights are made or read, which may take minutes."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"Limit {args.limit} is out of range: use at least 1 prompt.")
    GenerationRequest(prompt="", max_new_tokens=args.max_new_tokens)  # refuses a number that is none


def _text_requests(
    args: argparse.Namespace, engine: Engine, prompts: Sequence[Prompt]
) -> list[GenerationRequest]:
    """Those that can be answered; which are not, and why, is said before the others are measured."""
    found = []
    for prompt in prompts:
        asked = (Message("user", prompt.text),)
        request = GenerationRequest(messages=asked, max_new_tokens=args.max_new_tokens)
        try:
            engine.encode(request, engine.plan.context)
            found.append(request)
        except (ConfigError, ContextLengthError) as error:
            note(f"localmoe: Prompt {prompt.id!r}: {error}")
    if not found:
        raise ConfigError(_left_out(len(prompts), len(prompts)))
    return found


def _left_out(refused: int, prompts: int) -> str:
    return f"{refused} of {prompts} prompts could not be measured: see above."


def _random_requests(args: argparse.Namespace, vocab_size: int) -> list[GenerationRequest]:
    count = SHAPE_PROMPTS if args.limit is None else args.limit
    shape = (count, args.prompt_tokens or SHAPE_PROMPT_TOKENS)
    ids = np.random.default_rng(args.synthetic.seed).integers(0, vocab_size, shape).tolist()
    return [GenerationRequest(prompt_token_ids=tuple(row), max_new_tokens=args.max_new_tokens) for row in ids]


def _measure(
    engine: Engine, requests: Sequence[GenerationRequest], setting: tuple[str, DraftLength], label: str
) -> Row:
    policy, draft_length = setting
    note(f"{label}{policy}, draft length {draft_length} ...")
    return measure_setting(engine, requests, policy, draft_length)


def _identical(args: argparse.Namespace, rows: Sequence[Row]) -> bool | None:
    """Whether all settings gave the same tokens; None where the simulation makes up what is accepted."""
    if args.synthetic is not None and args.synthetic.acceptance is not None:
        return None
    return same_tokens(rows)


def _print_json(args: argparse.Namespace, info: EngineInfo, plan: MemoryPlan, rows: Sequence[Row]) -> None:
    print_json(
        {
            "model": info.name,
            "synthetic": None if args.synthetic is None else args.synthetic.as_dict(),
            "device": info.device,
            "dtype": info.dtype,
            "draft": info.draft,
            "link": info.link,
            "plan": plan.as_dict(),
            "identical_tokens": _identical(args, rows),
            "rows": [row.summary() for row in rows],
        }
    )


def _print_table(args: argparse.Namespace, info: EngineInfo, plan: MemoryPlan, rows: Sequence[Row]) -> None:
    label = _label(args)
    print(f"{label}{info.name} on {info.device} ({info.dtype}), {len(rows[0].stats)} prompts")
    slots = f"{plan.num_slots} slots = {percent(plan.resident_share)} of the experts"
    where = f"experts: {info.lanes}" if plan.in_place else f"link: {info.link}, {slots}"
    print(f"{label}{where}, draft: {info.draft}")
    if args.synthetic is not None:
        print(f"{label}{args.synthetic}")
    columns = (label + COLUMNS[0], *COLUMNS[1:])
    lines = [cells(row.summary()) for row in rows]
    print_table(None, columns, [(label + first, *others) for first, *others in lines])
    for row in rows:
        aside = sum(stats.draft_aside for stats in row.stats)
        if aside:
            print(
                f"{label}{row.policy}, draft length {row.draft_length}: experts had the draft's memory for "
                f"{aside} of {len(row.stats)} prompts."
            )
    identical = _identical(args, rows)
    if identical is not None:
        same = "All settings gave the same tokens." if identical else "THE SETTINGS GAVE DIFFERENT TOKENS."
        print(f"{label}{same}")
