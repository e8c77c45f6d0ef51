"""`localmoe trace`: answer prompts greedily and write down which experts the target used for every token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from localmoe.cli.load_options import engine_config
from localmoe.cli.output import ProgressBars, note, print_json
from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError, ContextLengthError
from localmoe.core.output_file import check_output
from localmoe.core.prompts import BUNDLED_PROMPTS, Prompt, read_prompts
from localmoe.core.routing_trace import TRACE, RoutingTrace
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.model.routing_trace import RoutingRecorder


def run_trace(args: argparse.Namespace) -> None:
    """Record, write, and say what was recorded.

    Raises:
        LocalMoeError: for one sentence to the user.
    """
    prompts = read_prompts(args.prompts or BUNDLED_PROMPTS, args.limit)
    check_output(TRACE, args.out)  # said before hours of answers, not after
    requests = [
        GenerationRequest(messages=(Message("user", prompt.text),), max_new_tokens=args.max_new_tokens)
        for prompt in prompts
    ]
    with ProgressBars() as progress:
        engine = Engine.load(args.model, engine_config(args), progress=progress)
    with engine:
        note(f"Recording {len(requests)} prompts ...")
        recorder = RoutingRecorder(engine.footprint.num_layers)
        engine.record_routing(recorder)
        try:
            refused = _record(engine, recorder, prompts, requests)
        except BaseException:  # Ctrl+C after hours, too
            if recorder.num_tokens:
                trace = recorder.trace(engine.info().name, engine.footprint.num_experts)
                trace.write(args.out)
                note(f"{len(trace.experts)} tokens had been recorded: {args.out}")
            raise
        refusal = f"{refused} of {len(prompts)} prompts could not be recorded: see above."
        if refused == len(prompts):
            raise ConfigError(refusal)
        trace = recorder.trace(engine.info().name, engine.footprint.num_experts)
    trace.write(args.out)
    _report(args, trace)
    if refused:
        raise ConfigError(refusal)


def _record(
    engine: Engine,
    recorder: RoutingRecorder,
    prompts: Sequence[Prompt],
    requests: Sequence[GenerationRequest],
) -> int:
    """How many prompts could not be used."""
    refused = 0
    for prompt, request in zip(prompts, requests, strict=True):
        engine.reset()  # a prefix that is reused from the prompt before would not be routed again
        recorder.begin()
        try:
            for _ in engine.stream(request):
                pass
        except (ConfigError, ContextLengthError) as error:  # of this prompt; hours of others are kept
            refused += 1
            note(f"localmoe: Prompt {prompt.id!r}: {error}")
    return refused


def _report(args: argparse.Namespace, trace: RoutingTrace) -> None:
    tokens, layers, top_k = trace.experts.shape
    repeat = trace.repeat_share()
    if args.json:
        print_json(
            {
                "trace": str(args.out),
                "model": trace.model,
                "prompts": len(trace.starts),
                "tokens": tokens,
                "layers": layers,
                "experts": trace.num_experts,
                "experts_per_token": top_k,
                "repeat_share": repeat,
            }
        )
        return
    print(
        f"Recorded {tokens} tokens of {len(trace.starts)} prompts, {layers} layers, {top_k} of "
        f"{trace.num_experts} experts a token, of {trace.model}: {args.out}"
    )
    if repeat is not None:
        print(
            f"A token's experts are {100 * repeat:.1f} % those of the token before (--routing "
            f"sticky:{repeat:.3f}); with uniform routing {100 * top_k / trace.num_experts:.1f} % would be."
        )
