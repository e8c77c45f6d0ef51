"""How much of written answers prompt lookup finds in the text before them, and what a step that verifies it
gains: human (or another model's) answers to real questions are replayed as if the target had said them, with
the drafter and the governor of the engine. Predicted, not measured: a step takes what `--ms` says by the rows
of its verify pass (of benchmarks/prompt_lookup.py), and a token is a word with the space before it, or a
piece of punctuation, which is a little longer than models' tokens are.

    python benchmarks/lookup_rates.py --ms 1:10.1 2:14.2 4:14.0 8:16.0 16:17.9 FILE.jsonl[.gz] ...

With --draft TOKENS:MS:RATE the model drafts so many tokens a step, each of which takes MS and is accepted
at that rate, and what is looked up takes a draft's place; times as fast is then beside such drafts alone.

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

from localmoe.speculative.either_governor import EitherGovernor
from localmoe.speculative.governor import FixedGovernor, Governor
from localmoe.speculative.lookup_governor import LookupGovernor
from localmoe.speculative.prompt_lookup import PromptLookupDrafter
from localmoe.speculative.step_record import StepRecord

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


@dataclass(frozen=True, slots=True)
class Draft:
    """So many tokens a step, each of which takes `ms` and is accepted at a rate; 0: none."""

    tokens: int = 0
    ms: float = 0.0
    rate: float = 0.0

    @classmethod
    def read(cls, text: str) -> Draft:
        """TOKENS:MS:RATE."""
        tokens, ms, rate = text.split(":")
        return cls(int(tokens), float(ms), float(rate))

    def step(self, luck: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[int, int, float, float]:
        """(drafted, accepted, seconds of the drafts, of the verify pass). luck: of each token that may follow
        one that is left to the target."""
        drafted = min(self.tokens, len(luck))
        accepted = int((luck[:drafted] < self.rate).cumprod().sum())
        return drafted, accepted, 1e-3 * self.ms * drafted, float(seconds[drafted])


def drafted_alone(draft: Draft, luck: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Seconds of an answer, but for its first token. luck: of each further one."""
    said, took_s = 0, 0.0
    while said < len(luck):
        _, accepted, draft_s, verify_s = draft.step(luck[said : len(luck) - 1], seconds)
        took_s += draft_s + verify_s
        said += accepted + 1
    return took_s


def replay(
    before: list[int],
    answer: list[int],
    governor: Governor,
    seconds: NDArray[np.float64],
    draft: Draft,
    found: Found,
) -> None:
    """One answer, step by step."""
    drafter, said = PromptLookupDrafter(frozenset()), 1  # the prompt's own pass says the first token
    luck = np.random.default_rng(found.answers).random(len(answer) - 1)
    found.answers += 1
    found.tokens += len(answer)
    found.plain_s += drafted_alone(draft, luck, seconds)
    history = [*before, *answer[:1]]
    while said < len(answer):
        room = min(LONGEST, len(answer) - said - 1)
        most, gate = (room, None) if draft.tokens else governor.choose_gated(room)
        proposal = drafter.look_up(history, most)
        margins, draft_s = proposal.margins, 0.0
        kept = len(proposal.tokens) if gate is None else gate.worth_verifying(margins)
        if draft.tokens:
            kept = governor.instead(margins)
        looked_up = kept > 0
        tokens, right = proposal.tokens[:kept], answer[said : said + kept]
        accepted = next(
            (i for i, pair in enumerate(zip(tokens, right, strict=True)) if pair[0] != pair[1]), kept
        )
        verify_s = float(seconds[kept])
        if draft.tokens and not looked_up:
            margins = []
            kept, accepted, draft_s, verify_s = draft.step(luck[said - 1 : len(luck) - 1], seconds)
        instead = looked_up and draft.tokens > 0
        governor.observe(StepRecord(kept, accepted, draft_s, verify_s, margins, found=instead))
        found.steps += 1
        found.drafted += kept if looked_up else 0
        found.accepted += accepted if looked_up else 0
        found.seconds += draft_s + verify_s
        history += answer[said : said + accepted + 1]
        said += accepted + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ms", nargs="+", default=["1:10.1", "2:14.2", "4:14.0", "8:16.0", "16:17.9"])
    parser.add_argument("--draft", type=Draft.read, default=Draft(), help="TOKENS:MS:RATE")
    parser.add_argument("--limit", type=int, default=400, help="answers of a file")
    args = parser.parse_args()
    seconds, ids = step_seconds(args.ms), dict[str, int]()

    def encode(text: str) -> list[int]:
        return [ids.setdefault(piece, len(ids)) for piece in _PIECES.findall(text)]

    for path in args.files:
        # as of one engine that is used for such things alone
        governor: Governor = LookupGovernor(LONGEST)
        if args.draft.tokens:
            governor = EitherGovernor(FixedGovernor(args.draft.tokens), LONGEST)
        found = Found()
        for before, answer in read_chats(path):
            pieces = encode(answer)
            if len(pieces) > 1:
                replay(encode(before), pieces, governor, seconds, args.draft, found)
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
