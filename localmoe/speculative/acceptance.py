"""Why a drafted token is accepted. Greedy, or where the draft drew nothing: it is the target's own choice.
Sampled: speculative rejection sampling, which leaves the target's distribution unchanged (Leviathan et al.
2023, theorem 3.5; Chen et al. 2023, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` drafted tokens are kept; `token` is the target's own, which follows them."""

    accepted: int
    token: int


def accept_greedy(choices: Sequence[int], drafted: Sequence[int]) -> Verdict:
    """Keep drafted tokens while they equal the target's argmax.

    Args:
        choices: the target's argmax at each of the len(drafted) + 1 window positions.
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def accept_drawn(
    target: Callable[[int], Tensor], drafted: Sequence[int], draw: Callable[[Tensor], int]
) -> Verdict:
    """Keep drafted tokens while they equal what is drawn from the target's distribution. A token that was
    certain to be proposed is accepted as often as by rejection sampling, p(x), but each emitted token takes
    one draw as without drafts: with a seed, the same ones are emitted whatever was proposed.

    Args:
        target, draw: as accept_sampled's.
    """
    for i, token in enumerate(drafted):
        own = draw(target(i))
        if own != token:
            return Verdict(i, own)
    return Verdict(len(drafted), draw(target(len(drafted))))


def accept_sampled(
    target: Callable[[int], Tensor],
    draft: Sequence[Tensor],
    drafted: Sequence[int],
    uniform: Callable[[], float],
    draw: Callable[[Tensor], int],
) -> Verdict:
    """Keep drafted token x_i with probability min(1, p_i(x_i) / q_i(x_i)); on rejection draw from the
    residual.

    Args:
        target: i -> p_i (V,), the target's distribution at window position i; asked only as far as needed.
        draft: q_i (V,), the distribution that x_i was drawn from.
        uniform, draw: the random stream.
    """
    for i, token in enumerate(drafted):
        p, q = target(i), draft[i]
        # r < p/q without a division: x was drawn from q, so q(x) > 0, but p(x) may be 0
        if uniform() * float(q[token]) < float(p[token]):
            continue
        return Verdict(i, draw(residual(p, q)))
    return Verdict(len(drafted), draw(target(len(drafted))))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) up to its sum; p itself where that is all zeros (p and q equal up to rounding)."""
    rest = torch.clamp(p - q, min=0.0)
    return rest if float(rest.sum()) > 0.0 else p
