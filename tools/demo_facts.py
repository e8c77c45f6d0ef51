"""Own questions with one short right answer for the demo model: sums, counting, animals, colours, days.

Writes (question, answer) pairs from the lists in demo_facts.txt; how often each is trained on is not
decided here.
"""

from __future__ import annotations

import random

from demo_chat import vary
from demo_lists import read_pairs, read_sections

_SECTIONS = read_sections("demo_facts.txt")
ASK_SUM, UNITS, TENS = (_SECTIONS[k][0] for k in ("ask_sum", "units", "tens"))
DAYS, MONTHS = _SECTIONS["days"][0], _SECTIONS["months"][0]
ANIMALS = read_pairs(_SECTIONS["animals"])  # animal -> "sound, baby, legs, home"
COLOURS, CAPITALS = read_pairs(_SECTIONS["colours"]), read_pairs(_SECTIONS["capitals"])
OPPOSITES = list(read_pairs(_SECTIONS["opposites"]).items())
SINGLE = list(zip(*_SECTIONS["single"], strict=True))
WORDS = {"+": ["plus", "and"], "-": ["minus", "take away"], "*": ["times", "multiplied by"]}
SYMBOLS = {"+": ["+"], "-": ["-"], "*": ["*", "x"]}


def number_word(n: int) -> str:
    """English for 0 <= n < 100."""
    if n < 20:
        return UNITS[n]
    return TENS[n // 10] + (f"-{UNITS[n % 10]}" if n % 10 else "")


def a_or_an(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def sum_turn(rng: random.Random) -> tuple[str, str]:
    """One sum, mostly of one-digit numbers, in digits or in words, answered in the form it was asked."""
    op = rng.choices(["+", "-", "*"], [5, 4, 2])[0]
    top = rng.choices([10, 20, 50 if op != "*" else 12], [7, 2, 1])[0]
    a, b = rng.randint(0, top), rng.randint(0, top)
    if op == "*":
        a, b = min(a, 12), min(b, 10)
    if op == "-" and b > a and rng.random() < 0.85:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    sign = f"minus {number_word(-value)}" if value < 0 else number_word(min(value, 99))
    if value < 100 and rng.random() < 0.35:
        word = rng.choice(WORDS[op])
        asked, answer = (
            f"{number_word(a)} {word} {number_word(b)}",
            f"{number_word(a)} {word} {number_word(b)} is {sign}.",
        )
        answer = answer[0].upper() + answer[1:]
    else:
        spoken = rng.random() < 0.3
        mark = rng.choice(WORDS[op][:1] if spoken else SYMBOLS[op])
        gap = "" if not spoken and rng.random() < 0.3 else " "
        asked = f"{a}{gap}{mark}{gap}{b}"
        answer = f"{a} {mark} {b} {'is' if spoken else '='} {value}."
    return vary(rng.choice(ASK_SUM).format(e=asked), rng), answer


def animal_turn(rng: random.Random) -> tuple[str, str]:
    """One question about a well-known animal."""
    animal = rng.choice(list(ANIMALS))
    sound, baby, legs, home = ANIMALS[animal].split(", ")
    it = a_or_an(animal)
    return rng.choice(
        [
            (f"What does {it} say?", f"{it.capitalize()} says {sound}."),
            (f"What sound does {it} make?", f"{it.capitalize()} says {sound}."),
            (f"What is a baby {animal} called?", f"A baby {animal} is called {a_or_an(baby)}."),
            (f"How many legs does {it} have?", f"{it.capitalize()} has {number_word(int(legs))} legs."),
            (f"Where does {it} live?", f"{it.capitalize()} lives {home}."),
        ]
    )


def order_turn(rng: random.Random) -> tuple[str, str]:
    """What comes next, what is more, counting to a number."""
    row = rng.choice([DAYS, MONTHS])
    i, n = rng.randrange(len(row)), rng.randint(1, 20)
    other = (n + rng.randint(1, 9)) % 21
    return rng.choice(
        [
            (f"What comes after {row[i]}?", f"After {row[i]} comes {row[(i + 1) % len(row)]}."),
            (f"What comes before {row[i]}?", f"Before {row[i]} comes {row[i - 1]}."),
            (f"What number comes after {n}?", f"After {n} comes {n + 1}."),
            (f"Count to {n}", ", ".join(str(k) for k in range(1, n + 1)) + "."),
            (f"Can you count to {n}?", "Yes: " + ", ".join(str(k) for k in range(1, n + 1)) + "."),
            (f"Which is bigger, {n} or {other}?", f"{max(n, other)} is bigger than {min(n, other)}."),
        ]
    )


def fact_turn(rng: random.Random) -> tuple[str, str]:
    """One small fact, asked and answered."""
    kind = rng.randrange(6)
    if kind == 0:
        thing, colour = rng.choice(list(COLOURS.items()))
        asked, answer = f"What color is {thing}?", f"{thing[0].upper() + thing[1:]} is {colour}."
    elif kind == 1:
        pair = rng.choice(OPPOSITES)
        first, second = pair if rng.random() < 0.5 else pair[::-1]
        asked, answer = f"What is the opposite of {first}?", f"The opposite of {first} is {second}."
    elif kind == 2:
        country, city = rng.choice(list(CAPITALS.items()))
        asked, answer = f"What is the capital of {country}?", f"The capital of {country} is {city}."
    elif kind == 3:
        asked, answer = rng.choice(SINGLE)
    else:
        asked, answer = (animal_turn if kind == 4 else order_turn)(rng)
    return vary(asked, rng), answer
