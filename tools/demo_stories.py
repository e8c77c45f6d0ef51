"""Turns the corpus' short stories into answers to "tell me a story about a fox".

Finds what a story is about, asks for it in many ways, and makes further versions with another animal or
name, so that the model learns to take the subject from the request. It does not decide which stories may be
trained on.
"""

from __future__ import annotations

import random
import re

from demo_lists import read_words

WORDS = read_words("demo_words.txt")
ANIMALS, FLYING, SWIMMING, THINGS = (WORDS[k] for k in ("animals", "flying", "swimming", "story_nouns"))
GIRLS, BOYS, NEW_GIRLS, NEW_BOYS = (WORDS[k] for k in ("girls", "boys", "new_girls", "new_boys"))
ASK, ASK_ANY = WORDS["ask_story"], WORDS["ask_any_story"]
LEAD = [
    "Here is a story about {}.\n\n",
    "Sure! Here is a story about {}.\n\n",
    "All right, a story about {}.\n\n",
]
LEAD_ANY = ["Here is a story.\n\n", "Sure! Here is a story for you.\n\n"]
MAX_CHARS = 1500  # about 400 tokens: two such stories and their requests fit one training row


def a_or_an(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def count_word(text: str, word: str) -> int:
    """How often a noun or its plural occurs, case ignored."""
    return len(re.findall(rf"\b{word}(?:s|es|'s)?\b", text, re.IGNORECASE))


def subject_of(text: str) -> str | None:
    """The noun a story is about: an animal or thing named early and often, None where nothing stands out."""
    opening = text[:400]
    best, best_score = None, 0.0
    for words, least, weight in ((ANIMALS, 3, 2.0), (THINGS, 3, 1.0)):
        for word in words:
            if (
                count_word(opening, word)
                and (n := count_word(text, word)) >= least
                and n * weight > best_score
            ):
                best, best_score = word, n * weight
    return best


def hero_of(text: str) -> str | None:
    """The first well-known name that a story opens with."""
    found = re.search(r"\b(" + "|".join(GIRLS + BOYS) + r")\b", text[:300])
    return found.group(1) if found else None


def fit(text: str) -> str | None:
    """The story, cut at a paragraph if it is too long; None where it then does not end in a full sentence."""
    if len(text) > MAX_CHARS:
        cut = text[:MAX_CHARS].rfind("\n")
        text = text[:cut] if cut > MAX_CHARS // 2 else ""
    text = text.strip()
    return text if len(text) > 150 and text[-1] in '.!?"' else None


def same_kind(animal: str) -> list[str]:
    """Animals that can stand in for this one: what flies for what flies, what swims for what swims."""
    return next(
        (list(kind) for kind in (FLYING, SWIMMING) if animal in kind),
        [a for a in ANIMALS if a not in FLYING + SWIMMING],
    )


def replace_noun(text: str, old: str, new: str) -> str:
    """Another animal in the same story: article, plural and capital follow."""

    def swap(found: re.Match[str]) -> str:
        article, noun, suffix = found.group(1) or "", found.group(2), found.group(3) or ""
        word = new if noun[0].islower() else new.capitalize()
        if article:
            kept = "an" if new[0] in "aeiou" else "a"
            article = (kept if article[0].islower() else kept.capitalize()) + article[len(article.rstrip()) :]
        if suffix == "s" and new.endswith("y") and new[-2] not in "aeiou":
            word, suffix = word[:-1], "ies"
        elif suffix == "s" and new.endswith(("s", "x", "ch", "sh")):
            suffix = "es"
        elif suffix == "es":
            suffix = "es" if new.endswith(("x", "ch", "sh")) else "s"
        return article + word + suffix

    return re.sub(rf"\b(an? )?({old})(es|s)?\b", swap, text, flags=re.IGNORECASE)


def replace_name(text: str, old: str, new: str) -> str:
    """Another name for the hero."""
    return re.sub(rf"\b{old}\b", new, text)


def versions(text: str, count: int, rng: random.Random) -> list[str]:
    """The story itself and up to `count` versions with another animal (where it has one) and another name."""
    out = [text]
    animal, hero = subject_of(text), hero_of(text)
    for _ in range(count):
        other = text
        if animal in ANIMALS:
            free = [a for a in same_kind(animal) if not count_word(text, a)] or [animal]
            # foxes are asked for most, and the corpus has few
            other = replace_noun(
                other, animal, "fox" if "fox" in free and rng.random() < 0.15 else rng.choice(free)
            )
        if hero is not None:
            free = [n for n in (NEW_GIRLS if hero in GIRLS else NEW_BOYS) if not count_word(text, n)]
            other = replace_name(other, hero, rng.choice(free))
        if other != text:
            out.append(other)
    return out


def maybe_lower(text: str, rng: random.Random) -> str:
    """The request as often typed: in lower case."""
    return text.lower() if rng.random() < 0.3 else text


def ask_for(named: str | None, rng: random.Random) -> tuple[str, str]:
    """(request, opening words of the answer) for a story about something, or about anything."""
    if named is None:
        return maybe_lower(rng.choice(ASK_ANY), rng), rng.choice(LEAD_ANY) if rng.random() < 0.25 else ""
    asked = maybe_lower(rng.choice(ASK).format(named), rng)
    return asked, rng.choice(LEAD).format(named) if rng.random() < 0.25 else ""


def story_turn(text: str, rng: random.Random) -> tuple[str, str]:
    """One request and the story as its answer."""
    subject, hero = subject_of(text), hero_of(text)
    named: str | None
    if subject is None and hero is None:
        named = None
    elif subject is None or (hero is not None and rng.random() < 0.2):
        named = rng.choice([f"{hero}", f"a child named {hero}", f"someone called {hero}"])
    else:
        named = a_or_an(subject)
    asked, lead = ask_for(named, rng)
    return asked, lead + text


def plot_turn(subjects: list[str], name: str, text: str, rng: random.Random) -> tuple[str, str]:
    """One request for a story of the project's own plots; it may name the hero, the friend, or nothing."""
    named: str | None = a_or_an(subjects[0])
    roll = rng.random()
    if roll < 0.22:
        named = None
    elif roll < 0.37 and len(subjects) > 1:
        named = f"{named} {rng.choice(['named', 'called'])} {name}"
    elif roll < 0.42:
        named = name
    elif roll < 0.57 and len(subjects) > 1:
        named = f"{named} and {a_or_an(subjects[1])}"
    asked, lead = ask_for(named, rng)
    return asked, lead + text
