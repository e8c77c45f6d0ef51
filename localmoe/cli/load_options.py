"""Options of how a model is loaded, and the EngineConfig that they describe. Loads nothing."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

from localmoe.cli.lane_options import add_lane_options
from localmoe.cli.option_types import checked
from localmoe.core.config import (
    ALLOWED_DRAFT_BITS,
    EXPERTS_ON,
    LONGEST_UNASKED,
    USUAL_CONTEXT,
    DrafterName,
    EngineConfig,
    parse_draft_length,
)
from localmoe.core.draft_config import NF4_BITS
from localmoe.core.errors import CheckpointError, ConfigError
from localmoe.core.units import parse_bytes, parse_speed
from localmoe.hub.weight_files import read_json_object

DEFAULTS = EngineConfig()
_NONE = re.compile(r"0+(\.0+)?\s*[a-zA-Z]*")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Those of the model itself, without who drafts for it."""
    parser.add_argument(
        "--vram-budget",
        type=checked(parse_bytes),
        metavar="SIZE",
        help="device memory to use, e.g. 12GiB; default: what is free, less a reserve",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of prompt and answer together; default: {USUAL_CONTEXT}, or the model's own limit if "
        f"that is less, and up to {LONGEST_UNASKED} where they take little of the memory",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--no-packing",
        action="store_true",
        help="keep experts and the output head in 16 bits a weight; default: bfloat16 in 12, without loss, "
        "and FP8, NVFP4 and INT4 as published, where that can be",
    )
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--experts-on",
        choices=EXPERTS_ON,
        default=DEFAULTS.experts_on,
        help="disk: where RAM does not hold all experts, they lie in a file on the disk, and as many of them "
        "in RAM as there is room for; slower; default: %(default)s",
    )
    parser.add_argument(
        "--ram-budget",
        type=checked(parse_bytes),
        metavar="SIZE",
        help="of RAM for experts that lie on the disk; default: what is free, less a reserve",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Those, lanes, and who drafts."""
    add_target_options(parser)
    parser.add_argument(
        "--draft-length",
        type=checked(parse_draft_length),
        default=DEFAULTS.draft_length,
        metavar="auto|N",
        help="tokens drafted a step; 0 is off; default: %(default)s",
    )
    add_lane_options(parser)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="a draft folder other than the default")
    parser.add_argument(
        "--draft-bits",
        type=int,
        choices=ALLOWED_DRAFT_BITS,
        help=f"of the default draft; default: {DEFAULTS.draft_bits}",
    )
    parser.add_argument(
        "--drafter", choices=["auto", "self", "prompt-lookup", "mtp"], default=DEFAULTS.drafter,
        help="who proposes: the model in INT4 (self), a look into the text so far, or the model's own layer "
        "for it (multi-token prediction, mtp), where its files have one; auto: that layer on a GPU, where "
        "there is one, else self",
    )  # fmt: skip
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="a smaller model with the same tokenizer proposes"
    )
    parser.add_argument(
        "--prompt-cache", type=checked(_cache_size), metavar="SIZE",
        help="RAM for what other chats, or clients, had left in the KV cache, so that going back to one "
        "reads only what is new; 0 is none; default: up to a sixteenth of all RAM, as far as it is free",
    )  # fmt: skip
    parser.add_argument(
        "--emulated-link", type=checked(parse_speed), metavar="SPEED", help="e.g. 2GB/s; CPU only"
    )
    parser.set_defaults(check=partial(check_load, parser))


def _cache_size(text: str) -> int:
    """Bytes, or none.

    Raises:
        ConfigError: the text is no size.
    """
    return 0 if _NONE.fullmatch(text.strip()) else parse_bytes(text)


def check_load(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse bits that the draft folder has not."""
    if args.draft is None or args.draft_bits is None:
        return
    bits = _bits_of(args.draft)
    if bits is not None and bits != args.draft_bits:
        parser.error(
            f"--draft-bits {args.draft_bits} contradicts --draft {args.draft}, a draft of {bits} bits: leave "
            "--draft-bits out"
        )


def _bits_of(folder: Path) -> int | None:
    """What a draft's files say, of localmoe's or others'; None where they do not, which loading refuses."""
    for name in ("quantize_config.json", "config.json"):
        try:
            found = read_json_object(folder / name)
        except CheckpointError:
            continue
        values = found.get("quantization_config", found)
        if isinstance(values, dict):
            bits = NF4_BITS if values.get("load_in_4bit") is True else values.get("bits")
            if isinstance(bits, int):
                return bits
    return None


def engine_config(args: argparse.Namespace, *, policy: str = DEFAULTS.policy) -> EngineConfig:
    """The EngineConfig that load options describe.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig(
        vram_budget_bytes=args.vram_budget,
        context=args.context,
        policy=policy,
        draft_length=args.draft_length,
        lanes=args.lanes,
        strict=args.strict,
        cpu_threads=args.cpu_threads,
        drafter=_drafter(args),
        draft_model=args.draft_model,
        draft_dir=args.draft,
        draft_bits=DEFAULTS.draft_bits if args.draft_bits is None else args.draft_bits,
        emulated_link_bytes_per_s=args.emulated_link,
        prompt_cache_bytes=args.prompt_cache,
        pack_experts=not args.no_packing,
        experts_on=args.experts_on,
        ram_budget_bytes=args.ram_budget,
        device=args.device,
        dtype=args.dtype,
    )


def _drafter(args: argparse.Namespace) -> DrafterName:
    if args.draft_model is not None and args.drafter != "auto":
        raise ConfigError(f"--draft-model and --drafter {args.drafter} exclude each other: leave one out.")
    drafter: DrafterName = args.drafter if args.draft_model is None else "model"
    return drafter
