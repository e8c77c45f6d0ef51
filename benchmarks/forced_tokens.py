"""What tokens that a grammar leaves no choice about are worth: calls of a tool and JSON of a schema by the
embedded model, with nothing drafted, with what the text looks up, and with what is forced too. Tokens have to
be the same in each way.

    python benchmarks/forced_tokens.py [--device cpu] [--gb-s 0.5 --mib 60] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest
from localmoe.core.stats import GenerationStats
from localmoe.core.tools import Tool
from localmoe.core.types import Message
from localmoe.engine import Engine, stepping
from localmoe.hub.catalogue import demo_folder
from localmoe.speculative.forced_tokens import ForcedOrFound
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        "days_of_forecast": {"type": "integer", "minimum": 1, "maximum": 14},
        "include_wind_speed": {"type": "boolean"},
    },
    "required": ["city", "temperature_unit", "days_of_forecast", "include_wind_speed"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather_forecast", json.dumps({"name": "weather_forecast", "parameters": CITY})),)
ASKED = (Message("user", "What is the weather in Paris?"),)
ORDERS: dict[str, dict[str, Any]] = {
    "call of a tool": {"tools": TOOLS, "must_call": ("weather_forecast",)},
    "JSON of a schema": {"json_schema": json.dumps(CITY)},
}
WAYS: dict[str, tuple[DraftLength, bool]] = {
    "nothing drafted": (0, False), "looked up": ("auto", False), "forced and looked up": ("auto", True),
}  # fmt: skip


def by_text_alone(end_tokens: frozenset[int], grammar: Grammar) -> PromptLookupDrafter:
    return PromptLookupDrafter(end_tokens)


def answer(engine: Engine, order: dict[str, Any], way: str) -> tuple[list[int], GenerationStats]:
    length, forced = WAYS[way]
    setattr(stepping, "ForcedOrFound", ForcedOrFound if forced else by_text_alone)  # noqa: B010
    events = list(engine.stream(GenerationRequest(ASKED, max_new_tokens=250, draft_length=length, **order)))
    stats = events[-1].stats
    assert stats is not None and events[-1].finish_reason == "stop"
    return [token for event in events for token in event.token_ids], stats


def with_tools(folder: Path) -> str:
    """The embedded model, whose template knows no tools, with one that does."""
    template = Path(shutil.copytree(demo_folder(), folder / "model")) / "chat_template.jinja"
    template.write_text("{{ tools | tojson if tools }}\n" + template.read_text())
    return str(template.parent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gb-s", type=float, help="an emulated link, on a CPU")
    parser.add_argument("--mib", type=int, help="VRAM budget")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = EngineConfig(
        device=args.device, drafter="prompt-lookup", context=1024, strict=True,
        vram_budget_bytes=args.mib << 20 if args.mib else None,
        emulated_link_bytes_per_s=args.gb_s * 1e9 if args.gb_s else None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Engine.load(with_tools(Path(folder)), config) as engine:
        for order_name, order in ORDERS.items():
            found: dict[str, list[GenerationStats]] = {way: [] for way in WAYS}
            expected: list[int] | None = None
            for _ in range(args.rounds + 1):  # the first teaches the governors
                for way in WAYS:
                    tokens, stats = answer(engine, order, way)
                    expected = expected or tokens
                    assert tokens == expected, "what was drafted changed the answer"
                    found[way].append(stats)
            assert expected is not None
            for way, all_stats in found.items():
                last, rounds = all_stats[-1], all_stats[1:]
                tpot_ms = statistics.median(1e3 * (stats.tpot_s or 0.0) for stats in rounds)
                print(
                    f"{order_name}, {len(expected)} tokens, {way}: {last.steps} steps, {last.accepted} of "
                    f"{last.drafted} tokens accepted, {tpot_ms:.2f} ms a token",
                    flush=True,
                )


if __name__ == "__main__":
    main()
