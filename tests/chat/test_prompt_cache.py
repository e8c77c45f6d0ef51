"""Texts that were left: what is kept of them, for how long, and that going back is as if nobody had left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localmoe.chat import prompt_cache
from localmoe.chat.prompt_cache import LEAST_TOKENS, PromptCache, is_worth_copying, shared_prefix
from localmoe.chat.session import Session
from localmoe.model.sequence_copy import SequenceCopy

A_TOKEN = 8  # bytes


class State:
    """A sequence state that remembers the tokens themselves; a recurrent one cannot be shortened."""

    num_bytes = 0

    def __init__(self, *, recurrent: bool = False) -> None:
        self.tokens: list[int] = []
        self.recurrent = recurrent
        self.copies = self.brought_back = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def keepable(self, length: int) -> int:
        length = min(length, self.length)
        return length if not self.recurrent or length == self.length else 0

    def truncate(self, length: int) -> None:
        assert self.keepable(length) == length
        del self.tokens[length:]

    def release(self) -> None:
        self.tokens = []

    def wipe(self) -> None:
        self.release()

    @property
    def copy_bytes(self) -> int:
        return A_TOKEN * self.length

    def copy_out(self) -> SequenceCopy:
        self.copies += 1
        other = State(recurrent=self.recurrent)
        other.tokens = list(self.tokens)
        return SequenceCopy(self.length, (torch.tensor(self.tokens),), None, other.keepable)

    def bring_back(self, kept: SequenceCopy) -> None:
        self.brought_back += 1
        self.tokens = kept.parts[0].tolist()


def answer(
    state: State, session: Session, prompt: Sequence[int], reply: Sequence[int], exact: bool = True
) -> int:
    """Run a turn as the engine does; how much of the prompt was had already."""
    shared = session.begin(prompt, exact=exact)
    assert state.tokens == list(prompt[:shared]), "the state must hold exactly what is reused"
    state.tokens += prompt[shared:]
    session.extend(reply)
    state.tokens += reply[:-1]
    return shared


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()  # type: ignore[no-any-return]


@given(
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.lists(st.integers(0, 2), min_size=1),
                             st.booleans()), max_size=14),
    recurrent=st.booleans(), room=st.sampled_from([0, 100, 400, 10_000]),
)  # fmt: skip
def test_whatever_is_asked_in_turn_no_less_is_reused_than_without_it_and_only_what_may(
    turns: list[tuple[int, int, list[int], bool]], recurrent: bool, room: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_cache, "LEAST_TOKENS", 1)
        patch.setattr("localmoe.chat.session._PROMPT_END", 1)
        cache = PromptCache(lambda held: room)
        state, plain = State(recurrent=recurrent), State(recurrent=recurrent)
        session, alone = Session(state, cache), Session(plain)
        chats = [text(seed, 30) for seed in range(4)]
        for chat, start, reply, exact in turns:
            prompt = [*chats[chat][: 10 + start], 7]
            shared = answer(state, session, prompt, reply, exact)
            assert cache.num_bytes <= room
            if not recurrent:
                assert shared >= answer(plain, alone, prompt, reply, exact)
            chats[chat] = [*prompt, *reply]


def test_a_chat_that_is_gone_back_to_runs_only_what_is_new() -> None:
    for recurrent in (False, True):
        state = State(recurrent=recurrent)
        session = Session(state, PromptCache(lambda held: 1 << 20))
        chats, reused = [text(1, 300), text(2, 500)], []
        for _ in range(3):
            for chat in chats:
                reused.append(answer(state, session, chat, [1, 2, 3]))
                chat += [1, 2, 3, *text(len(chat), 20)]
        assert reused == [0, 0, 302, 502, 325, 525]
        assert (state.copies, state.brought_back) == (5, 4)


def test_the_next_turn_of_a_chat_is_no_other_text() -> None:
    """Nor is the same question again, or one whose answer's thoughts are left out."""
    state = State()
    session, prompt = Session(state, PromptCache(lambda held: 1 << 20)), text(1, 300)
    answer(state, session, [*prompt, 5, 6], text(3, 2000))
    answer(state, session, [*prompt, 5, 6], text(4, 200))
    answer(state, session, [*prompt, *text(5, 90)], text(6, 200))
    assert state.copies == 0
    answer(state, session, text(7, 100), [1])
    assert state.copies == 1


def test_those_that_were_left_longest_ago_make_room_and_what_has_none_is_not_kept() -> None:
    state, room = State(), 700 * A_TOKEN
    cache = PromptCache(lambda held: room)
    session, chats = Session(state, cache), [text(seed, 300) for seed in range(4)]
    for chat in chats:
        answer(state, session, chat, [1, 2])
    assert len(cache) == 2
    assert answer(state, session, [*chats[0], 5], [1]) == 0, "it was left longest ago"
    assert answer(state, session, [*chats[3], 5], [1]) == 300
    answer(state, session, text(9, 900), [1])
    assert answer(state, session, [*chats[0], 9], [1]) == 300
    assert cache.num_bytes <= room, "900 tokens are more than there is room for"
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_room_that_others_have_taken_meanwhile_is_given_back() -> None:
    state, room = State(), [10_000 * A_TOKEN]
    cache = PromptCache(lambda held: room[0])
    session = Session(state, cache)
    for seed in range(5):
        answer(state, session, text(seed, 200), [1])
    assert len(cache) == 4
    room[0] = 450 * A_TOKEN
    answer(state, session, text(9, 200), [1])
    assert len(cache) == 2 and cache.num_bytes <= room[0]


def test_a_text_is_kept_once() -> None:
    state = State()
    cache = PromptCache(lambda held: 1 << 20)
    for tokens in (text(1, 200), text(1, 300), text(1, 250), text(2, 100)):
        state.tokens = list(tokens)
        cache.keep(state, np.asarray(tokens), exact=True)
    assert len(cache) == 2 and state.copies == 3
    state.tokens = text(1, 400)
    cache.keep(state, np.asarray(state.tokens), exact=False)
    assert len(cache) == 3, "an exact one is more than one that is not"


def test_what_is_not_exact_is_no_part_of_an_exact_turn() -> None:
    state = State()
    session, one, other = Session(state, PromptCache(lambda held: 1 << 20)), text(1, 300), text(2, 300)
    answer(state, session, one, [1, 2], exact=False)
    answer(state, session, other, [1, 2], exact=True)
    assert answer(state, session, [*one, 1, 2, 3], [1], exact=True) == 0
    answer(state, session, other, [1, 2], exact=False)
    assert answer(state, session, [*one, 1, 2, 4], [1], exact=False) > 0
    session.forget()
    assert answer(state, session, [*other, 1], [1], exact=False) == 0


def test_a_chat_that_begins_with_a_few_words_is_kept_too() -> None:
    state = State()
    session, begin = Session(state, PromptCache(lambda held: 1 << 20)), text(0, 4)  # a template's
    answer(state, session, [*begin, *text(1, 12)], text(2, 300))
    answer(state, session, [*begin, *text(3, 12)], text(4, 5))
    assert state.copies == 1
    back = [*begin, *text(1, 12), *text(2, 300), 5, 6]
    assert answer(state, session, back, [1]) == len(back) - 3


def test_what_a_draft_wrote_behind_a_text_is_not_kept_with_it() -> None:
    for recurrent in (False, True):
        state = State(recurrent=recurrent)
        session = Session(state, PromptCache(lambda held: 1 << 20))
        session.begin(text(1, 100))
        state.tokens = [*text(1, 100), *text(2, 900)]  # nobody says what these are
        answer(state, session, text(3, 100), [1])
        found = answer(state, session, [*text(1, 100), 7], [1])
        assert (found, state.copies) == ((0, 1) if recurrent else (100, 2)), "the other text is kept in both"


def test_a_text_for_which_there_is_no_ram_is_not_kept_and_the_turn_goes_on() -> None:
    state = State()
    cache = PromptCache(lambda held: 1 << 20)
    session = Session(state, cache)
    answer(state, session, text(1, 100), [1])
    answer(state, session, text(2, 100), [1])

    def refuse() -> SequenceCopy:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")

    state.copy_out = refuse  # type: ignore[method-assign]
    assert answer(state, session, text(3, 100), [1]) == 0
    assert len(cache) == 1
    state.copy_out = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        session.begin(text(4, 100))


@pytest.mark.parametrize(
    ("spared", "length", "worth"),
    [(LEAST_TOKENS - 1, 10, False), (LEAST_TOKENS, 10, True), (100, 900, False), (113, 900, True)],
)
def test_what_takes_longer_to_copy_than_to_read_is_read(spared: int, length: int, worth: bool) -> None:
    assert is_worth_copying(spared, length) is worth


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_a_shared_prefix_is_the_longest(one: list[int], other: list[int]) -> None:
    count = shared_prefix(np.asarray(one, dtype=np.int64), np.asarray(other, dtype=np.int64))
    assert one[:count] == other[:count]
    assert count in (len(one), len(other)) or one[count] != other[count]
