"""Strings the demo model's own small talk, sums, facts and stories together into conversations.

Decides the order of turns and what is remembered in between (the user's name); the sentences are elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from demo_chat import (
    ASK_NAME,
    INTENTS,
    KNOWN_NAME,
    NAME_REPLIES,
    PEOPLE,
    TELL_NAME,
    UNKNOWN_NAME,
    hard_turn,
    intent_turn,
    vary,
)
from demo_facts import fact_turn, sum_turn
from demo_replies import name_turns, pet_turns, slot_turn

Turn = tuple[str, str]
Messages = list[dict[str, str]]
MIDDLE = [
    name
    for name in INTENTS
    if name not in ("greeting", "fine_reply", "sad_reply", "thanks", "bye", "story_liked")
]
SYSTEM = [
    "You are a helpful assistant.",
    "You are localmoe demo, a tiny demo model.",
    "Be short and friendly.",
    "You are a friendly assistant.",
    "Answer briefly.",
]


def to_messages(turns: Sequence[Turn], rng: random.Random, system_share: float = 0.05) -> Messages:
    """Turns as chat messages, now and then with a system message in front."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < system_share else []
    for asked, answer in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return messages


def small_talk(rng: random.Random, story: Callable[[], Turn]) -> Messages:
    """Maybe a greeting, then a few turns of any kind (at most two stories), maybe thanks and good-bye."""
    turns: list[Turn] = []
    name, stories = None, 0
    if rng.random() < 0.6:
        turns.append(intent_turn("greeting", rng))
        if rng.random() < 0.3:
            turns.append(intent_turn("how_are_you", rng))
            turns.append(intent_turn(rng.choices(["fine_reply", "sad_reply"], [3, 1])[0], rng))
    for _ in range(rng.choice([1, 1, 2, 3, 4, 5])):
        kind = rng.random()
        if kind < 0.10:
            turns += pet_turns(rng) if rng.random() < 0.15 else [slot_turn(rng)]
        elif kind < 0.36:
            turns.append(intent_turn(rng.choice(MIDDLE), rng))
        elif kind < 0.46:
            turns.append(intent_turn(rng.choice(["who_are_you", "name", "can_do"]), rng))
        elif kind < 0.64:
            turns += [sum_turn(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        elif kind < 0.76:
            turns.append(fact_turn(rng))
        elif kind < 0.82:
            turns.append(hard_turn(rng))
        elif kind < 0.88 and name is None:
            name = rng.choice(PEOPLE)
            said = rng.choice(TELL_NAME).format(name)
            turns.append(
                (said if rng.random() < 0.7 else said.lower(), rng.choice(NAME_REPLIES).format(name))
            )
        elif kind < 0.93:
            answer = rng.choice(UNKNOWN_NAME) if name is None else rng.choice(KNOWN_NAME).format(name)
            turns.append((vary(rng.choice(ASK_NAME), rng), answer))
        elif stories < 2:
            turns.append(story())
            stories += 1
            if rng.random() < 0.35:
                turns.append(intent_turn("story_liked", rng))
    if rng.random() < 0.35:
        turns.append(intent_turn("thanks", rng))
    if rng.random() < 0.3:
        turns.append(intent_turn("bye", rng))
    return to_messages(turns or [intent_turn("greeting", rng)], rng)


def single(rng: random.Random) -> Messages:
    """One question alone: the commonest first message."""
    kinds = [
        lambda: intent_turn(rng.choice(list(INTENTS)), rng),
        lambda: hard_turn(rng),
        lambda: fact_turn(rng),
        lambda: slot_turn(rng),
    ]
    return to_messages([rng.choices(kinds, [4, 2, 3, 3])[0]()], rng)


def names(rng: random.Random, story: Callable[[], Turn]) -> Messages:
    """The user's name remembered over up to four other turns."""
    makers = [
        lambda: sum_turn(rng),
        lambda: fact_turn(rng),
        lambda: slot_turn(rng),
        lambda: intent_turn(rng.choice(MIDDLE), rng),
    ]
    between = [rng.choice(makers)() for _ in range(rng.choice([0, 1, 2, 3]))]
    if rng.random() < 0.35:
        between.insert(rng.randint(0, len(between)), story())
    turns = name_turns(between, rng)
    if rng.random() < 0.3:
        turns.insert(0, intent_turn("greeting", rng))
    return to_messages(turns, rng)


def sums(rng: random.Random) -> Messages:
    """One to four sums in a row."""
    return to_messages([sum_turn(rng) for _ in range(rng.choice([1, 1, 2, 4]))], rng)


def story_chat(turn: Turn, rng: random.Random) -> Messages:
    """A request for a story, sometimes after a greeting and sometimes with thanks after it."""
    turns = [turn]
    if rng.random() < 0.25:
        turns.insert(0, intent_turn(rng.choice(["greeting", "who_are_you", "can_do"]), rng))
    if rng.random() < 0.25:
        turns.append(intent_turn(rng.choice(["story_liked", "thanks", "bye"]), rng))
    return to_messages(turns, rng)
