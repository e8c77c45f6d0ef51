"""How much of a prompt is already in the sequence state: a true prefix, as long as it can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localmoe.chat.session import Session

tokens = st.lists(st.integers(0, 2), max_size=8)


class State:
    """A sequence state that remembers the tokens themselves; a recurrent one cannot be shortened."""

    num_bytes = 0

    def __init__(self, *, recurrent: bool = False) -> None:
        self.tokens: list[int] = []
        self.recurrent = recurrent

    @property
    def length(self) -> int:
        return len(self.tokens)

    def keepable(self, length: int) -> int:
        return length if not self.recurrent or length == self.length else 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        assert not self.recurrent or length in (0, len(self.tokens)), "recurrent state cannot be rolled back"
        del self.tokens[length:]


def common(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def answer(
    state: State, session: Session, prompt: list[int], reply: list[int], *, read: int | None = None
) -> int:
    """Run a turn as the engine does; with `read`, it breaks off after that many tokens of the prompt."""
    shared = session.begin(prompt)
    assert state.tokens == prompt[:shared], "the state must hold exactly what is reused"
    if read is not None:
        state.tokens += prompt[shared:][:read]
        return shared
    state.tokens += prompt[shared:]
    for token in reply:
        session.extend([token])
    state.tokens += reply[:-1]  # the last emitted token has not been run
    return shared


turns = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), tokens, st.none() | st.integers(0, 3)),
    max_size=8,
)


@given(turns, st.booleans())
def test_whatever_is_asked_in_turn_exactly_the_shared_prefix_is_reused(
    asked: list[tuple[list[int], list[int], int | None]], recurrent: bool
) -> None:
    state = State(recurrent=recurrent)
    session = Session(state)
    for prompt, reply, read in asked:
        held = list(state.tokens)
        longest = common(held, prompt[:-1])  # the last prompt token has to be run for its logits
        shared = answer(state, session, prompt, reply, read=read)
        if recurrent:
            assert shared == (longest if longest == len(held) else 0)
        else:
            assert shared == longest


@given(tokens, tokens, tokens, st.booleans())
def test_the_next_turn_of_a_chat_runs_only_what_is_new(
    prompt: list[int], reply: list[int], more: list[int], recurrent: bool
) -> None:
    prompt, reply, more = [1, *prompt], [*reply, 2], [0, *more]
    state = State(recurrent=recurrent)
    session = Session(state)
    assert answer(state, session, prompt, reply) == 0
    assert answer(state, session, [*prompt, *reply, *more], [1]) == len(prompt) + len(reply) - 1


def test_the_same_prompt_again_runs_its_last_token_only() -> None:
    state = State()
    session = Session(state)
    answer(state, session, [1, 2, 0, 1], [2, 2, 2])
    assert answer(state, session, [1, 2, 0, 1], []) == 3
    assert answer(state, session, [1, 2], []) == 1
    assert answer(state, session, [1], []) == 0


def test_an_edited_first_message_starts_again() -> None:
    for recurrent in (False, True):
        state = State(recurrent=recurrent)
        session = Session(state)
        answer(state, session, [1, 2, 0], [2, 1])
        assert answer(state, session, [0, 2, 0], [2]) == 0


def test_a_recurrent_state_is_forgotten_where_another_would_be_shortened() -> None:
    prompt, reply = [1, 2, 0], [2, 1, 0]
    retry = [*prompt, 1, 1]
    for recurrent, expected in ((False, 3), (True, 0)):
        state = State(recurrent=recurrent)
        session = Session(state)
        answer(state, session, prompt, reply)
        assert answer(state, session, retry, [1]) == expected


def test_a_state_that_was_emptied_behind_its_back_is_not_reused() -> None:
    state = State()
    session = Session(state)
    answer(state, session, [1, 2, 0], [2])
    state.truncate(1)  # a pass broke and was rolled back
    assert answer(state, session, [1, 2, 0, 2, 1], [0]) == 1


def test_an_exact_turn_builds_on_no_other() -> None:
    state = State()
    session = Session(state)
    shared = []
    for exact in (True, True, False, False, True, True):
        shared.append(session.begin([1, 2, 3, 4], exact=exact))
        state.tokens += [1, 2, 3, 4][shared[-1] :]
        assert state.tokens == [1, 2, 3, 4]
    assert shared == [0, 3, 3, 3, 0, 3]
