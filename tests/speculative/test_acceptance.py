"""Which drafted tokens are kept, and what follows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from localmoe.speculative.acceptance import Verdict, accept_greedy, accept_sampled, residual

tokens = st.integers(0, 2)


@given(st.lists(tokens, max_size=6), st.data())
def test_greedily_the_longest_common_start_is_kept_and_the_targets_token_follows(
    drafted: list[int], data: st.DataObject
) -> None:
    choices = data.draw(st.lists(tokens, min_size=len(drafted) + 1, max_size=len(drafted) + 1))
    verdict = accept_greedy(choices, drafted)
    emitted = [*drafted[: verdict.accepted], verdict.token]
    assert emitted == choices[: verdict.accepted + 1]  # every emitted token is the target's choice
    assert verdict.accepted == len(drafted) or drafted[verdict.accepted] != choices[verdict.accepted]


def never(_: object = None) -> float:
    raise AssertionError("nothing is random here")


def sampled(
    p: list[list[float]],
    q: list[list[float]],
    drafted: list[int],
    uniforms: list[float],
    draw: Callable[[Tensor], int] = lambda weights: int(weights.argmax()),
) -> tuple[Verdict, list[int], list[float]]:
    """(verdict, target positions that were asked for, uniform numbers that were left)."""
    asked: list[int] = []
    stream = list(uniforms)

    def target(i: int) -> Tensor:
        asked.append(i)
        return torch.tensor(p[i])

    verdict = accept_sampled(target, [torch.tensor(row) for row in q], drafted, lambda: stream.pop(0), draw)
    return verdict, asked, stream


def test_a_token_is_kept_when_the_draw_is_below_p_over_q_and_not_at_it() -> None:
    p, q = [[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5]]
    assert sampled(p, q, [0], [0.49])[0] == Verdict(1, 0)
    assert sampled(p, q, [0], [0.5])[0] == Verdict(0, 1)
    assert sampled(p, q, [1], [0.999])[0].accepted == 1  # p above q: always


def test_a_token_that_the_target_rules_out_is_never_kept() -> None:
    assert sampled([[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5]], [0], [0.0])[0] == Verdict(0, 1)


def test_the_first_rejection_ends_the_window_and_later_positions_are_not_asked_for() -> None:
    p = [[0.5, 0.5], [0.1, 0.9], [0.5, 0.5], [0.5, 0.5]]
    q = [[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]
    verdict, asked, left = sampled(p, q, [0, 0, 1], [0.3, 0.5, 0.1])
    assert (verdict, asked, left) == (Verdict(1, 1), [0, 1], [0.1])


def test_after_a_whole_window_the_next_token_comes_from_the_target_itself() -> None:
    drawn: list[Tensor] = []
    p = [[0.5, 0.5], [0.2, 0.8]]
    verdict, asked, _ = sampled(p, [[0.5, 0.5]], [1], [0.7], lambda weights: drawn.append(weights) or 0)
    assert (verdict, asked) == (Verdict(1, 0), [0, 1])
    assert drawn[0].tolist() == pytest.approx([0.2, 0.8])


def test_without_a_draft_the_token_is_a_plain_draw() -> None:
    verdict, asked, left = sampled([[0.2, 0.8]], [], [], [0.5])
    assert (verdict, asked, left) == (Verdict(0, 1), [0], [0.5])


def test_the_residual_is_what_the_target_has_more_of() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.2, 0.1])
    rest = residual(p, q)
    assert (rest / rest.sum()).tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert p.tolist() == pytest.approx([0.5, 0.3, 0.2, 0.0])  # its arguments are left alone


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_where_nothing_is_left_the_residual_is_the_target(weights: list[float]) -> None:
    p = torch.tensor(weights) / sum(weights)
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, p * 1.001), p)  # below q everywhere, as rounding may have it


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_rejected_and_residual_mass_add_up_to_the_target(pairs: list[tuple[float, float]]) -> None:
    p, q = (torch.tensor(side, dtype=torch.float64) + 1e-3 for side in zip(*pairs, strict=True))
    p, q = p / p.sum(), q / q.sum()
    kept = torch.minimum(p, q)  # drafted and accepted
    rest = residual(p, q)
    emitted = kept + (1 - kept.sum()) * rest / rest.sum()
    torch.testing.assert_close(emitted, p, atol=1e-12, rtol=1e-9)
