"""`localmoe generate`: answer one prompt or a file of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localmoe.cli.answer_line import answer_line
from localmoe.cli.image_files import read_images
from localmoe.cli.load_options import engine_config
from localmoe.cli.output import ProgressBars, note, print_json
from localmoe.cli.sampling_options import json_schema, loaded_sampling, sampling_config
from localmoe.core.config import GenerationRequest, SamplingConfig
from localmoe.core.errors import ConfigError, ContextLengthError
from localmoe.core.output_file import check_output
from localmoe.core.prompts import Prompt, read_prompts
from localmoe.core.stream import StreamEvent
from localmoe.core.timeline import TIMELINE, write_trace
from localmoe.core.types import Image, Message
from localmoe.engine import Engine

_TIMELINE_STEPS = 4096  # the last ones, of all prompts


def run_generate(args: argparse.Namespace) -> None:
    """Load, answer, print: text as it streams, or a JSON line a prompt.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    sampling = sampling_config(args)
    prompts = read_prompts(args.prompts) if args.prompts else [Prompt("prompt", args.prompt)]
    schema = json_schema(args)
    images = read_images(args.image)
    requests = [_request(prompt, args, sampling, schema, images) for prompt in prompts]
    if args.timeline is not None:
        check_output(TIMELINE, args.timeline)  # said before the answers, not after
    config = engine_config(args, policy=args.policy)
    with ProgressBars() as progress:
        engine = Engine.load(args.model, config, progress=progress)
    with engine:
        if args.timeline is not None:
            engine.live.record_timeline(_TIMELINE_STEPS)
        sampling = loaded_sampling(args, engine)
        asked = [replace(request, sampling=sampling) for request in requests]
        try:
            refused = _answer_all(args, engine, prompts, asked)
        except BaseException:  # Ctrl+C too
            if engine.live.timeline():
                _write_timeline(args, engine)
            raise
        _write_timeline(args, engine)
    if refused:
        raise ConfigError(f"{refused} of {len(prompts)} prompts could not be answered: see above.")


def _write_timeline(args: argparse.Namespace, engine: Engine) -> None:
    if args.timeline is not None:
        write_trace(args.timeline, engine.live.timeline(), f"localmoe {engine.info().name}")


def _answer_all(
    args: argparse.Namespace, engine: Engine, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]
) -> int:
    """How many of several prompts could not be answered."""
    refused = 0
    for prompt, request in zip(prompts, requests, strict=True):
        try:
            _print(args, engine, prompt, request, titled=len(prompts) > 1)
        except (ConfigError, ContextLengthError) as error:  # of this prompt; the others may be fine
            if args.prompts is None:
                raise
            refused += 1
            note(f"localmoe: Prompt {prompt.id!r}: {error}")
    return refused


def _request(
    prompt: Prompt,
    args: argparse.Namespace,
    sampling: SamplingConfig,
    schema: str | None,
    images: tuple[Image, ...],
) -> GenerationRequest:
    settings: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens, "sampling": sampling, "draft_only": args.draft_only,
        "thinking": args.thinking, "json_schema": schema,
    }  # fmt: skip
    if args.raw:
        if images:
            raise ConfigError("A raw prompt has no place for pictures: leave out --raw, or --image.")
        return GenerationRequest(prompt=prompt.text, **settings)
    return GenerationRequest(messages=(Message("user", prompt.text, images=images),), **settings)


def _print(
    args: argparse.Namespace, engine: Engine, prompt: Prompt, request: GenerationRequest, *, titled: bool
) -> None:
    if args.json:
        print_json(_answer(engine, prompt, request))
    else:
        _show(engine, prompt, request, titled=titled)


def _answer(engine: Engine, prompt: Prompt, request: GenerationRequest) -> dict[str, object]:
    events = list(engine.stream(request))
    last = events[-1]
    return {
        "id": prompt.id,
        "text": "".join(event.text for event in events),
        "prompt_token_ids": list(events[0].prompt_token_ids),
        "token_ids": [token for event in events for token in event.token_ids],
        "finish_reason": last.finish_reason,
        "stats": last.stats.as_dict(),
    }


def _show(engine: Engine, prompt: Prompt, request: GenerationRequest, *, titled: bool) -> None:
    event: StreamEvent | None = None
    for event in engine.stream(request):
        if titled:  # not before it is known that there is an answer
            sys.stdout.write(f"== {prompt.id}\n")
            titled = False
        sys.stdout.write(event.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    assert event is not None, "an answer has at least one event"
    note(answer_line(event.stats, engine.info().link))
