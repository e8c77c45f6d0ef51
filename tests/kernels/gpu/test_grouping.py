"""Grouping on the device against the same thing written plainly, with every output in a sea of nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.plain_groups import PlainTile, Row, plain_after, plain_groups
from torch import Tensor

pytest.importorskip("triton")

from dense_cases import DEVICE, poisoned_empty

from localmoe.kernels.gpu.grouping import Groups, group_pairs
from localmoe.kernels.residency import HIT, LATE, MISS, MISS_KEPT, MISS_REPLACED, ON_HOST, ResidencyView

NONSENSE = -(1 << 20)
HOST, SLOTS, FREE = 1 << 40, 1 << 30, 1 << 20  # addresses of host records, slots that are taken, free slots
LANDING = 4


@pytest.fixture(autouse=True)
def fresh_memory_is_nonsense() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        yield


def row_of(tickets: list[int], scores: list[float], num_free: int, done: int, landing: int = LANDING) -> Row:
    """A table row with addresses that tell experts and slots apart."""
    address = [(HOST if ticket < 0 else SLOTS) + 16 * e for e, ticket in enumerate(tickets)]
    free = [FREE + 16 * i if i < num_free else 0 for i in range(landing)]
    return Row(address, [HOST + 16 * e for e in range(len(tickets))], tickets, scores, free, done)


def on_device(row: Row) -> tuple[ResidencyView, Tensor]:
    """The row as tensors in the middle of larger ones, and the larger one that the log lies in."""

    def amid(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        padded = [NONSENSE, *values, NONSENSE, NONSENSE]
        return torch.tensor(padded, dtype=dtype, device=DEVICE)[1 : 1 + len(values)]

    sea = torch.full((len(row.address) + 40,), NONSENSE, dtype=torch.int32, device=DEVICE)
    view = ResidencyView(
        amid(list(row.address), torch.int64),
        amid(list(row.home), torch.int64),
        amid(list(row.ticket), torch.int64),
        amid(list(row.score), torch.float32),
        amid(list(row.landing), torch.int64),
        torch.tensor([row.done], device=DEVICE),
        sea[20 : 20 + len(row.address)],
    )
    return view, sea


def strided(index: list[list[int]]) -> Tensor:
    """The same numbers with strides of their own, between indices of experts that exist."""
    made = torch.zeros(len(index), 2 * len(index[0]) + 3, dtype=torch.int64, device=DEVICE)
    made[:, 1 : 1 + 2 * len(index[0]) : 2] = torch.tensor(index)
    return made[:, 1 : 1 + 2 * len(index[0]) : 2]


def tiles_of(groups: Groups) -> list[PlainTile]:
    """The tiles that have pairs; the others must lie behind them and be empty."""
    begins, ends = groups.begin.tolist(), groups.end.tolist()
    used = sum(begin < end for begin, end in zip(begins, ends, strict=True))
    assert begins[used:] == ends[used:] == [0] * (len(begins) - used)
    pairs = groups.pairs.tolist()
    places = zip(groups.address.tolist(), groups.ticket.tolist(), groups.landing.tolist(), strict=True)
    return [
        PlainTile(expert, tuple(pairs[begins[i] : ends[i]]), *place)
        for i, (expert, place) in enumerate(zip(groups.expert.tolist()[:used], places, strict=False))
    ]


def row_of_view(view: ResidencyView) -> Row:
    lists = (view.address, view.home, view.ticket, view.score, view.landing)
    return Row(*(tensor.tolist() for tensor in lists), int(view.done))


def around(tensor: Tensor) -> Tensor:
    """What lies before and behind a tensor of `on_device`."""
    whole = tensor.untyped_storage()
    sea = torch.tensor([], dtype=tensor.dtype, device=DEVICE).set_(whole)
    return torch.cat([sea[: tensor.storage_offset()], sea[tensor.storage_offset() + len(tensor) :]])


def check(
    index: list[list[int]], live: int, row: Row, live_dtype: torch.dtype = torch.int64, *,
    twice: bool = True, most_tokens: int = 0,
) -> None:  # fmt: skip
    view, sea = on_device(row)
    rows = torch.tensor([live], dtype=live_dtype, device=DEVICE)
    groups = group_pairs(strided(index), rows, view, most_tokens=most_tokens)
    tiles, log = plain_groups(index, live, row)
    assert tiles_of(groups) == tiles
    assert view.log.tolist() == log
    assert sorted(groups.pairs.tolist()) == list(range(len(index) * len(index[0])))
    after = plain_after(row, tiles, log)
    assert row_of_view(view) == after
    if twice:  # as the pass behind this one finds it
        behind = group_pairs(strided(index), torch.tensor([live], dtype=live_dtype, device=DEVICE), view)
        tiles, log = plain_groups(index, live, after)
        assert tiles_of(behind) == tiles and view.log.tolist() == log
        assert row_of_view(view) == plain_after(after, tiles, log)
    for tensor in (view.address, view.home, view.ticket, view.landing):
        assert (around(tensor) == NONSENSE).all()
    assert (sea[:20] == NONSENSE).all() and (sea[20 + len(log) :] == NONSENSE).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, Row]:
    tokens, top_k, experts = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 17))
    choice = st.integers(-2, experts + 2)  # outside the experts too
    index = draw(st.lists(st.lists(choice, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens))
    of_each = {"min_size": experts, "max_size": experts}
    tickets = draw(st.lists(st.sampled_from([ON_HOST, ON_HOST, 0, 0, 1, 2, 3, 4]), **of_each))
    scores = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 0.5, 7.0, math.inf]), **of_each))
    row = row_of(tickets, scores, draw(st.integers(0, LANDING)), draw(st.integers(0, 4)))
    return index, draw(st.integers(0, tokens + 2)), row


@settings(max_examples=40)
@given(cases())
@example(([[0, 1, 2]], 1, row_of([-1, -1, -1, 0, 2, 0], [0.0, 0.0, 0.0, 2.0, 0.0, 1.0], 1, 1)))
def test_pairs_places_and_log_are_those_of_the_plain_version(case: tuple[list[list[int]], int, Row]) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(72, 8, 60), (16, 10, 512), (33, 16, 128), (1, 1, 1)]
)
def test_windows_and_models_of_real_sizes(tokens: int, top_k: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k].tolist()
    tickets = torch.randint(-1, 5, (experts,), generator=generator).tolist()
    scores = torch.rand(experts, generator=generator).tolist()
    check(index, max(1, tokens - 3), row_of(tickets, scores, 3, 2, landing=16), torch.int32, twice=False)


@settings(max_examples=15)
@given(cases(), st.integers(0, 999))
def test_many_pairs_are_sorted_by_programs_of_their_own(
    case: tuple[list[list[int]], int, Row], seed: int
) -> None:
    """Of passes longer than windows, and of short ones by the same code."""
    index, live, row = case
    check(index, live, row, twice=False, most_tokens=4096)
    chance = torch.Generator().manual_seed(seed)
    tokens, top_k, experts = 140 + seed % 77, len(index[0]), len(row.address)
    many = torch.randint(-1, experts + 1, (tokens, top_k), generator=chance).tolist()
    check(many, tokens - seed % 9, row, twice=False, most_tokens=4096)


def test_tokens_that_are_padding_and_choices_of_no_expert_ask_for_nothing() -> None:
    row = row_of([ON_HOST] * 3, [0.0] * 3, 2, 0)
    for index, live in (([[0, 1], [1, 2]], 0), ([[-1, 3], [7, 1]], 1)):
        view, _ = on_device(row)
        groups = group_pairs(strided(index), torch.tensor([live], device=DEVICE), view)
        assert tiles_of(groups) == []
        assert view.log.tolist() == [0, 0, 0]


def test_what_is_missing_comes_first_then_what_is_here_then_what_is_on_its_way() -> None:
    view, _ = on_device(row_of([3, ON_HOST, 0, ON_HOST, 4], [0.0] * 5, 0, 3))
    groups = group_pairs(strided([[4, 3, 2, 1, 0]]), torch.tensor([1], device=DEVICE), view)
    assert [tile.expert for tile in tiles_of(groups)] == [1, 3, 0, 2, 4]
    assert [tile.ticket for tile in tiles_of(groups)] == [0, 0, 3, 0, 4]
    assert view.log.tolist() == [HIT, MISS, HIT, MISS, LATE]


def test_free_slots_are_filled_first_then_those_of_the_lowest_scores_and_none_that_must_stay() -> None:
    tickets = [ON_HOST] * 5 + [0, 0, 0, 9, 0]
    scores = [0.0] * 5 + [3.0, 1.0, math.inf, 0.0, 2.0]  # 7 is needed, 8 has not arrived, 9 is asked for
    view, _ = on_device(row_of(tickets, scores, 2, 1))
    groups = group_pairs(strided([[4, 3, 2, 1, 0, 9]]), torch.tensor([1], device=DEVICE), view)
    landings = [tile.landing for tile in tiles_of(groups)]
    assert landings == [FREE, FREE + 16, SLOTS + 16 * 6, SLOTS + 16 * 5, 0, 0]
    kinds = [MISS_KEPT, MISS_KEPT | 1 << 8, MISS_REPLACED | 6 << 8, MISS_REPLACED | 5 << 8, MISS]
    assert view.log.tolist() == [*kinds, 0, 0, 0, 0, HIT]
