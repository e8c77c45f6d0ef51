"""How much of written answers prompt lookup finds in the text before them, and what a step that verifies it
gains: human (or another model's) answers to real questions are replayed as if the target had said them, with
the drafter and the governor of the engine. Predicted, not measured: a step takes what `--ms` says by the rows
of its verify pass (of benchmarks/prompt_lookup.py), and a token is a word with the space before it, or a
piece of punctuation, which is a little longer than models' tokens are.

    python benchmarks/lookup_rates.py --ms 1:10.1 2:14.2 4:14.0 8:16.0 16:17.9 FILE.jsonl[.gz] ...

A line is {"messages": [{"role", "content"}, ..]}, or {"prompt", "reference"}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localmoe.speculative.lookup_governor import LookupGovernor
from localmoe.speculative.prompt_lookup import PromptLookupDrafter

_PIECES = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+")
LONGEST = 64  # drafted tokens


@dataclass
class Found:
    """Of the answers of a file."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_s: float = 0.0


def read_chats(path: Path) -> Iterator[tuple[str, str]]:
    """(what stands before an answer, the answer)."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            item = json.loads(line)
            if "messages" not in item:
                yield item["prompt"] + "\n\n", item["reference"]
                continue
            before = ""
            for message in item["messages"]:
                if message["role"] == "assistant":
                    yield before, message["content"]
                before += message["content"] + "\n\n"


def step_seconds(points: list[str]) -> NDArray[np.float64]:
    """By rows from 1 on, on straight lines between what is given and beyond it."""
    rows, ms = zip(*((float(a), float(b)) for a, b in (point.split(":") for point in points)), strict=True)
    slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
    wanted = np.arange(1, LONGEST + 2)
    inside = np.interp(wanted, rows, ms)
    found: NDArray[np.float64] = (
        np.where(wanted > rows[-1], ms[-1] + slope * (wanted - rows[-1]), inside) / 1e3
    )
    return found


def replay(
    before: list[int], answer: list[int], governor: LookupGovernor, seconds: NDArray[np.float64], found: Found
) -> None:
    """One answer, step by step."""
    drafter, said = PromptLookupDrafter(frozenset()), 1  # the prompt's own pass says the first token
    found.answers += 1
    found.tokens += len(answer)
    found.plain_s += seconds[0] * (len(answer) - 1)
    history = [*before, *answer[:1]]
    while said < len(answer):
        most, gate = governor.choose_gated(min(LONGEST, len(answer) - said - 1))
        proposal = drafter.look_up(history, most)
        margins = proposal.margins
        kept = len(proposal.tokens) if gate is None else gate.worth_verifying(margins)
        tokens, right = proposal.tokens[:kept], answer[said : said + kept]
        accepted = next(
            (i for i, pair in enumerate(zip(tokens, right, strict=True)) if pair[0] != pair[1]), kept
        )
        governor.observe(kept, accepted, 0.0, float(seconds[kept]), margins)
        found.steps += 1
        found.drafted += kept
        found.accepted += accepted
        found.seconds += float(seconds[kept])
        history += answer[said : said + accepted + 1]
        said += accepted + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ms", nargs="+", default=["1:10.1", "2:14.2", "4:14.0", "8:16.0", "16:17.9"])
    parser.add_argument("--limit", type=int, default=400, help="answers of a file")
    args = parser.parse_args()
    seconds, ids = step_seconds(args.ms), dict[str, int]()

    def encode(text: str) -> list[int]:
        return [ids.setdefault(piece, len(ids)) for piece in _PIECES.findall(text)]

    for path in args.files:
        governor, found = (
            LookupGovernor(LONGEST),
            Found(),
        )  # as of one engine that is used for such things alone
        for before, answer in read_chats(path):
            pieces = encode(answer)
            if len(pieces) > 1:
                replay(encode(before), pieces, governor, seconds, found)
            if found.answers == args.limit:
                break
        share = 100 * found.accepted / found.tokens
        print(
            f"predicted: {path.name.split('.')[0]}: {found.answers} answers of "
            f"{found.tokens / found.answers:.0f} tokens, {share:.1f} % of them looked up, {found.accepted} "
            f"of {found.drafted} tokens accepted, {found.plain_s / found.seconds:.3f} x as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
