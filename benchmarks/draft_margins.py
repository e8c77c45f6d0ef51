"""What the margins of drafted tokens say: of answers of the embedded model, how many tokens each class of
margins has, and how many of them are its INT4 draft's first choice too; and what steps that stop by them
reach beside fixed lengths, by replaying the answers with given costs.

python benchmarks/draft_margins.py [--answers 40] [--tokens 160] [--bits 4 3 2]

Greedy answers to prompts; weights rounded to the nearest codes, dequantised to float32 and computed by
transformers. In the replay, verify passes differ by 15 % (standard deviation), and what the draft says behind
a rejected token is taken from the answer, as if the token had been right.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from draft_quality import Subject, answers, rounded

from localmoe.speculative.governor import CANDIDATES, AutoGovernor, FixedGovernor, Governor
from localmoe.speculative.margin_rates import CLASSES, class_of
from localmoe.speculative.step_record import StepRecord

Text = list[tuple[float, bool]]  # margin of each drafted token, and whether the target agrees
# seconds of a drafted token, and of a verify pass by its tokens
COSTS: dict[str, tuple[float, Callable[[int], float]]] = {
    "4 of 60 experts, uniform": (1.5e-3, lambda window: 2e-3 + 78e-3 * (1 - (56 / 60) ** window)),
    "6 ms and 1.2 ms a token": (1.5e-3, lambda window: 6e-3 + 1.2e-3 * window),
    "30 ms and 3 ms a token": (1.5e-3, lambda window: 30e-3 + 3e-3 * window),
    "2 of 16 experts, uniform": (2.5e-3, lambda window: 2e-3 + 360e-3 * (1 - (14 / 16) ** window)),
    "9 ms and 2.5 ms, drafts 5 ms": (5e-3, lambda window: 9e-3 + 2.5e-3 * window),
}


def replay(texts: list[Text], governor: Governor, cost: str, ahead: bool, seed: int) -> tuple[float, float]:
    """Tokens a second, and tokens verified a step. ahead: the next token is drafted before the last one's
    margin is known, if the gate expects to want it."""
    draft_s, verify_s = COSTS[cost]
    chance, tokens, seconds, verified, steps = random.Random(seed), 0, 0.0, 0, 0
    for text in texts:
        at = 0
        while at < len(text):
            rest = len(text) - at
            most, gate = governor.choose_gated(rest)
            margins = [margin for margin, _ in text[at : at + most]]
            count = most
            if gate is not None:
                heard, issued = 0, min(1, most)
                while heard < issued:
                    if ahead and issued < most and gate.goes_on(margins[:heard], issued - heard):
                        issued += 1
                    heard += 1
                    if heard == issued < most and gate.goes_on(margins[:heard]):
                        issued += 1
                margins = margins[:heard]
                count = gate.worth_verifying(margins)
            agreed = [right for _, right in text[at : at + count]]
            accepted = agreed.index(False) if False in agreed else count
            took_s = verify_s(count + 1) * chance.lognormvariate(0, 0.15)
            governor.observe(StepRecord(count, accepted, draft_s * len(margins), took_s, margins))
            seconds += draft_s * len(margins) + took_s
            tokens, at, verified, steps = (
                tokens + accepted + 1,
                at + accepted + 1,
                verified + count,
                steps + 1,
            )
    return tokens / seconds, verified / steps


def read(subject: Subject, texts: list[tuple[torch.Tensor, int]], targets: list[torch.Tensor]) -> list[Text]:
    """What the draft that is filled in says of the answers."""
    found = []
    for (ids, prompt), target in zip(texts, targets, strict=True):
        rows = slice(prompt - 1, len(ids) - 1)
        draft = subject.read(ids)[0][rows]
        first, second = draft.topk(2).values.unbind(-1)
        right = draft.argmax(-1) == target[rows].argmax(-1)
        found.append(list(zip((first - second).tolist(), right.tolist(), strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3, 2])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    subject = Subject()
    texts = answers(subject, args.answers, args.tokens)
    targets = [subject.read(ids)[0] for ids, _ in texts]
    for bits in args.bits:
        subject.fill(rounded(bits))
        found = read(subject, texts, targets)
        kept, lost = [0] * CLASSES, [0] * CLASSES
        for margin, right in (token for text in found for token in text):
            (kept if right else lost)[class_of(margin)] += 1
        print(f"{bits} bits: {sum(kept) / sum(kept + lost):.4f} of {sum(kept + lost)} tokens accepted")
        print(f"  accepted by class: {kept}; rejected: {lost}", flush=True)
        for cost in COSTS:
            fixed = {g: replay(found, FixedGovernor(g), cost, False, 0)[0] for g in CANDIDATES}
            best = max(fixed, key=fixed.__getitem__)
            for ahead in (False, True):
                runs = [replay(found, AutoGovernor(64), cost, ahead, seed) for seed in range(args.seeds)]
                speed, length = (sum(column) / len(runs) for column in zip(*runs, strict=True))
                what = "next one drafted meanwhile" if ahead else "drafted one by one"
                print(
                    f"  {cost}, {what}: {speed:.1f} tok/s with {length:.1f} tokens a step, "
                    f"{speed / fixed[best]:.3f} of the best fixed length's ({best})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
