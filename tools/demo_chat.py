"""Own small talk for the demo model: greetings, who it is, what it can and cannot do, feelings, good-byes.

The sentences are in demo_small_talk.txt; this file says how they are typed and asked. demo_dialogues.py
strings them together into conversations.
"""

from __future__ import annotations

import random

from demo_lists import read_sections

_SECTIONS = read_sections("demo_small_talk.txt")
HARD_QUESTIONS, HARD_ANSWERS = _SECTIONS.pop("hard")
TOPICS, _ = _SECTIONS.pop("topics")
ABOUT_PEOPLE, _ = _SECTIONS.pop("about_people")
FAMOUS, _ = _SECTIONS.pop("famous")
CODE_REQUESTS, _ = _SECTIONS.pop("code_requests")
TELL_NAME, NAME_REPLIES = _SECTIONS.pop("tell_name")
ASK_NAME, KNOWN_NAME = _SECTIONS.pop("ask_name")
_, UNKNOWN_NAME = _SECTIONS.pop("unknown_name")
PEOPLE, _ = _SECTIONS.pop("people")
# intent -> (what a person may say, what the model answers); few answers, so that a tiny model learns them
INTENTS = _SECTIONS


def vary(text: str, rng: random.Random) -> str:
    """The same line as a hurried person may type it: lower case, no full stop, a doubled mark."""
    roll = rng.random()
    if roll < 0.35:
        text = text.lower()
    elif roll < 0.40:
        text = text.upper()
    if rng.random() < 0.35:
        text = text.rstrip(".!?")
    elif text and text[-1].isalnum() and rng.random() < 0.3:
        text += rng.choice([".", "!"])
    return text


def intent_turn(name: str, rng: random.Random) -> tuple[str, str]:
    """One (user, assistant) exchange of a named intent."""
    asked, answers = INTENTS[name]
    return vary(rng.choice(asked), rng), rng.choice(answers)


def hard_turn(rng: random.Random) -> tuple[str, str]:
    """A question beyond the model, and its honest refusal."""
    roll = rng.random()
    if roll < 0.25:
        asked = rng.choice(CODE_REQUESTS)
    elif roll < 0.5:
        asked = rng.choice(ABOUT_PEOPLE).format(rng.choice(FAMOUS))
    else:
        asked = rng.choice(HARD_QUESTIONS).format(rng.choice(TOPICS))
    return vary(asked, rng), rng.choice(HARD_ANSWERS)
