"""Which experts RAM holds, against a naive model of the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.types import ExpertKey
from localmoe.experts.ram_places import NOWHERE, RamPlaces

LAYERS, EXPERTS = 3, 4
KEYS = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
FRESH = 1e9  # worth of what was brought in a pass that is noted later


@dataclass
class Naive:
    """Remembers every demand, and who is where."""

    free: set[int]
    now: int = 0
    demands: int = 0
    at: dict[ExpertKey, int] = field(default_factory=dict)
    asked: dict[ExpertKey, list[int]] = field(default_factory=lambda: {key: [] for key in KEYS})
    more: dict[ExpertKey, list[tuple[int, int]]] = field(default_factory=lambda: {key: [] for key in KEYS})
    held: dict[ExpertKey, int] = field(default_factory=lambda: dict.fromkeys(KEYS, 0))
    unused: set[ExpertKey] = field(default_factory=set)
    awaited: set[ExpertKey] = field(default_factory=set)
    fresh: set[ExpertKey] = field(default_factory=set)

    def worth(self, key: ExpertKey) -> float:
        if key in self.fresh:
            return FRESH
        ages = [(self.now - when, 0) for when in self.asked[key]]
        ages += [(self.now - when, before) for when, before in self.more[key]]
        return sum(0.5 ** (age + before) + 5 * 0.01 * 0.99 ** (age + before) for age, before in ages)

    def demand(self, layer: int, experts: set[int]) -> None:
        self.demands += 1
        self.now += self.demands % LAYERS == 0
        for expert in experts:
            self.asked[ExpertKey(layer, expert)].append(self.now)
            self.unused.discard(ExpertKey(layer, expert))
        self.awaited = {key for key in self.awaited if key.layer != layer}
        self.fresh = {key for key in self.fresh if key.layer != layer}

    def choose(self, layer: int, tokens: list[list[int]]) -> None:
        """What each token of a pass chose, which was one demand of all."""
        for expert in {expert for chosen in tokens for expert in chosen if expert < EXPERTS}:
            assert self.asked[ExpertKey(layer, expert)].pop() == self.now
        for number, chosen in enumerate(tokens):
            for expert in (one for one in chosen if one < EXPERTS):
                self.more[ExpertKey(layer, expert)].append((self.now, len(tokens) - 1 - number))

    def demand_all(self, keys: set[ExpertKey]) -> None:
        self.now += 1
        for key in keys:
            self.asked[key].append(self.now)
            self.unused.discard(key)
        self.awaited, self.fresh = set(), set()

    def may_go(self, *, ahead: bool) -> set[ExpertKey]:
        candidates = {key for key in self.at if not self.held[key]}
        others = candidates - self.awaited
        return others if others or ahead else candidates

    def leave(self, key: ExpertKey) -> int:
        self.unused.discard(key)
        self.awaited.discard(key)
        self.fresh.discard(key)
        return self.at.pop(key)


class Both:
    """The places and their model, which must agree after each step."""

    def __init__(self, num_places: int) -> None:
        self.places = RamPlaces(num_places, (LAYERS, EXPERTS))
        self.naive = Naive(set(range(num_places)))

    def demand(self, layer: int, *experts: int) -> None:
        self.places.note_demand(layer, experts)
        self.naive.demand(layer, set(experts))

    def prompt(self, layer: int, tokens: list[list[int]]) -> None:
        self.demand(layer, *{expert for chosen in tokens for expert in chosen if expert < EXPERTS})
        self.places.note_tokens(layer, np.array(tokens, dtype=np.int32).reshape(-1, 2))
        self.naive.choose(layer, tokens)

    def demand_all(self, keys: set[ExpertKey]) -> None:
        demanded = np.zeros((LAYERS, EXPERTS), dtype=np.bool_)
        for key in keys:
            demanded[key] = True
        self.places.note_pass(demanded)
        self.naive.demand_all(keys)

    def hold(self, key: ExpertKey, by: int) -> None:
        by = max(by, -self.naive.held[key])
        self.places.held[key] += by
        self.naive.held[key] += by

    def take(self, key: ExpertKey, *, ahead: bool) -> ExpertKey | None:
        """Who gave way."""
        naive = self.naive
        place, victim = self.places.free_place(), None
        if place is not None:
            naive.free.remove(place)
        else:
            assert not naive.free
            victim = self.places.victim(ahead=ahead)
            if victim is None:
                assert not naive.may_go(ahead=ahead)
                return None
            assert victim in naive.may_go(ahead=ahead)
            least = min(map(naive.worth, naive.may_go(ahead=ahead)))
            assert naive.worth(victim) == pytest.approx(least)
            place, wasted = self.places.evict(victim)
            assert wasted == (victim in naive.unused) and place == naive.leave(victim)
        self.places.give(place, key, asked=not ahead, ahead=ahead)
        naive.at[key] = place
        if ahead:
            naive.unused.add(key)
            naive.awaited.add(key)
        elif max([0, *naive.asked[key], *(when for when, _ in naive.more[key])]) != naive.now:
            naive.fresh.add(key)
        return victim

    def fill(self, key: ExpertKey) -> None:
        """A free place, if there is one, unasked."""
        place = self.places.free_place()
        if place is not None:
            self.naive.free.remove(place)
            self.places.give(place, key)
            self.naive.at[key] = place

    def forget(self) -> None:
        naive = self.naive
        gone = {key for key in naive.at if not naive.held[key]}
        assert set(self.places.forget()) == gone
        for key in gone:
            naive.free.add(naive.leave(key))
        naive.asked, naive.more = {key: [] for key in KEYS}, {key: [] for key in KEYS}
        naive.awaited, naive.fresh = set(), set()

    def give_back(self, key: ExpertKey) -> None:
        self.places.give_back(key)
        self.naive.free.add(self.naive.leave(key))

    def check(self) -> None:
        found = {key: int(self.places.place[key]) for key in KEYS if self.places.place[key] != NOWHERE}
        assert found == self.naive.at
        assert len(set(found.values())) == len(found), "two experts in one place"
        assert sorted([*found.values(), *self.naive.free]) == list(range(len(found) + len(self.naive.free)))


STEPS = st.one_of(
    st.tuples(st.just("demand"), st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1))),
    st.tuples(
        st.just("prompt"),
        st.integers(0, LAYERS - 1),
        st.lists(st.lists(st.integers(0, EXPERTS), min_size=2, max_size=2, unique=True), max_size=9),
    ),
    st.tuples(st.just("pass"), st.sets(st.sampled_from(KEYS)), st.none()),
    st.tuples(st.just("take"), st.sampled_from(KEYS), st.booleans()),
    st.tuples(st.just("hold"), st.sampled_from(KEYS), st.sampled_from([1, 1, -1])),
    st.tuples(st.just("give back"), st.sampled_from(KEYS), st.none()),
    st.tuples(st.just("fill"), st.sampled_from(KEYS), st.none()),
    st.tuples(st.just("forget"), st.none(), st.none()),
)


@settings(max_examples=200)
@given(st.integers(1, len(KEYS)), st.lists(STEPS, max_size=60))
def test_whatever_is_asked_for_the_rules_hold(
    num_places: int, steps: list[tuple[str, object, object]]
) -> None:
    both = Both(num_places)
    for what, first, second in steps:
        if what == "demand":
            both.demand(first, *second)  # type: ignore[arg-type, misc]
        elif what == "prompt":
            both.prompt(first, second)  # type: ignore[arg-type]
        elif what == "pass":
            both.demand_all(first)  # type: ignore[arg-type]
        elif what == "hold":
            both.hold(first, second)  # type: ignore[arg-type]
        elif what == "take" and first not in both.naive.at:
            both.take(first, ahead=bool(second))  # type: ignore[arg-type]
        elif what == "give back" and first in both.naive.at:
            both.give_back(first)  # type: ignore[arg-type]
        elif what == "fill" and first not in both.naive.at:
            both.fill(first)  # type: ignore[arg-type]
        elif what == "forget":
            both.forget()
        both.check()


def test_what_is_asked_for_often_outlives_what_was_asked_for_last() -> None:
    both = Both(2)
    for _ in range(5):
        both.demand(0, 0)
    both.take(ExpertKey(0, 0), ahead=False)
    both.demand(0, 1)
    both.take(ExpertKey(0, 1), ahead=False)
    assert both.take(ExpertKey(0, 2), ahead=False) == (0, 1)


def test_what_was_asked_for_often_long_ago_gives_way_to_what_is_now() -> None:
    both = Both(2)
    for _ in range(5):
        both.demand(0, 0)
    both.take(ExpertKey(0, 0), ahead=False)
    both.demand(0, 1)
    both.take(ExpertKey(0, 1), ahead=False)
    for _ in range(200 * LAYERS):  # passes of other layers
        both.demand(1)
    both.demand(0, 1)
    assert both.take(ExpertKey(0, 2), ahead=False) == (0, 0)


def test_what_was_brought_for_a_pass_to_come_gives_way_last_and_to_no_other_such() -> None:
    both = Both(2)
    both.take(ExpertKey(1, 0), ahead=True)
    both.demand(0, 0)
    both.take(ExpertKey(0, 0), ahead=False)
    assert both.take(ExpertKey(1, 1), ahead=True) == (0, 0)
    assert both.take(ExpertKey(1, 2), ahead=True) is None and (1, 2) not in both.naive.at
    assert both.take(ExpertKey(0, 1), ahead=False) in [(1, 0), (1, 1)]


def test_of_a_prompt_what_its_last_tokens_chose_outlives_the_rest() -> None:
    """And what many of them did what one did."""
    both = Both(4)
    both.prompt(0, [[0, 1], [0, 1], [0, 2], [3, 0]])
    for expert in range(4):
        both.take(ExpertKey(0, expert), ahead=False)
    both.demand(1, 0, 1)
    assert [both.take(ExpertKey(1, expert), ahead=False) for expert in range(2)] == [(0, 1), (0, 2)]
    both.prompt(2, [[0, 1]] * 99 + [[2, 3]] * 20)
    values = both.places.worth()[2]
    assert values[2] == values[3] > values[0] == values[1] > values[2] / 2


def test_what_fills_free_places_gives_way_before_what_was_asked_for() -> None:
    """Also in a pass that is noted at its end only, and before what that one brought."""
    both = Both(4)
    both.demand_all({ExpertKey(0, 0)})
    both.take(ExpertKey(0, 0), ahead=False)
    both.demand_all({ExpertKey(0, 0)})
    for expert in (1, 2):
        both.fill(ExpertKey(0, expert))
    both.take(ExpertKey(1, 0), ahead=False)
    assert both.take(ExpertKey(1, 1), ahead=False) in [(0, 1), (0, 2)]
    assert both.take(ExpertKey(1, 2), ahead=False) in [(0, 1), (0, 2)]
    assert both.take(ExpertKey(1, 3), ahead=False) == (0, 0)


def test_what_was_brought_in_vain_gives_way_before_what_is_asked_for() -> None:
    """Else wrong guesses would fill the RAM, as each of them drives out what is used."""
    both = Both(3)
    both.demand(0, 0, 1)
    both.take(ExpertKey(0, 0), ahead=False)
    both.take(ExpertKey(0, 1), ahead=False)
    both.take(ExpertKey(1, 3), ahead=True)
    both.demand(1, 0)
    assert both.take(ExpertKey(1, 0), ahead=False) == (1, 3)


def test_wrong_guesses_do_not_fill_the_ram() -> None:
    both = Both(EXPERTS + 2)
    for number in range(40):
        for layer in range(LAYERS):
            both.demand(layer, 0)
            for key in (ExpertKey(layer, 0), ExpertKey((layer + 1) % LAYERS, 1 + number % 3)):
                if key not in both.naive.at:
                    both.take(key, ahead=key.expert != 0)
            both.check()
    assert {key for key in both.naive.at if key.expert == 0} == {(layer, 0) for layer in range(LAYERS)}


def test_a_pass_over_all_layers_keeps_what_it_has_brought_and_one_that_sweeps_does_not() -> None:
    both = Both(3)
    keys = [ExpertKey(layer, 0) for layer in range(LAYERS)]
    for key in keys:
        both.take(key, ahead=False)
    both.demand_all(set(keys))
    both.take(ExpertKey(0, 1), ahead=False)
    assert ExpertKey(0, 1) in both.naive.fresh
    # else it would be worth nothing until the end of the pass, and give way to what a later layer asks for
    assert both.take(ExpertKey(1, 1), ahead=False) != (0, 1)
    # of a pass that asks for nearly all, the layers that are behind it are asked for last
    victim = both.places.victim(ahead=False, before=2)
    assert victim is not None and victim.layer < 2
    assert both.places.victim(ahead=False, before=0) == (2, 0) or (2, 0) not in both.naive.at
