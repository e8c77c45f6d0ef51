"""Own short stories for the demo model: plots with slots, so that a story about any subject stays coherent.

The corpus has few stories for young readers; these teach a tiny model how a whole story hangs together and
that its hero is the one asked for. The plots are in demo_plots.txt; how stories are asked for is
demo_stories.py's.
"""

from __future__ import annotations

import random

from demo_lists import read_plots, read_words
from demo_stories import a_or_an

WORDS = read_words("demo_words.txt")
PLOTS = read_plots("demo_plots.txt")
LANDS = ["forest", "farm", "jungle", "garden", "sea", "castle", "town"]


def _fill(plot: list[list[str]], slots: dict[str, str], rng: random.Random) -> str:
    """One alternative of every sentence, slots filled, paragraphs joined."""
    text = " ".join(rng.choice(group) for group in plot).format(**slots)
    return text.replace(" \n", "\n")


def _slots(rng: random.Random) -> dict[str, str]:
    """Names, pronouns, places and things of one story."""
    he = rng.random() < 0.5
    name = rng.choice(WORDS["plot_names_he"] if he else WORDS["plot_names_she"])
    first, second = rng.sample(WORDS["plot_places"], 2)
    return {
        "N": name,
        "F": rng.choice([n for n in WORDS["plot_names_he"] + WORDS["plot_names_she"] if n != name]),
        "h": "he" if he else "she",
        "H": "He" if he else "She",
        "s": "his" if he else "her",
        "S": "His" if he else "Her",
        "an": "a boy" if he else "a girl",
        "place": first,
        "place2": second,
        "food": rng.choice(WORDS["plot_foods"]),
        "fear": rng.choice(WORDS["plot_fears"]),
        "skill": rng.choice(WORDS["plot_skills"]),
        "thing": rng.choice(WORDS["plot_things"]),
        "adj": rng.choice(WORDS["plot_colours"]),
    }


def hero_story(rng: random.Random) -> tuple[list[str], str, str]:
    """(what the story is about, its hero's name, the story): an animal, a person or a thing, and a friend."""
    land = rng.choice(LANDS)
    heroes = WORDS[f"heroes_{land}"]
    hero = "fox" if land == "forest" and rng.random() < 0.25 else rng.choice(heroes)
    if land == "town" and rng.random() < 0.6:
        hero = rng.choice(WORDS["plot_things"])  # so that any noun asked for can be a hero
    friend = rng.choice([h for h in heroes if h != hero])
    slots = _slots(rng)
    if hero in ("boy", "prince", "king", "knight", "wizard"):
        slots |= {
            "h": "he",
            "H": "He",
            "s": "his",
            "S": "His",
            "N": rng.choice([n for n in WORDS["plot_names_he"] if n != slots["F"]]),
        }
    elif hero in ("girl", "princess", "queen", "witch", "grandmother", "fairy"):
        slots |= {
            "h": "she",
            "H": "She",
            "s": "her",
            "S": "Her",
            "N": rng.choice([n for n in WORDS["plot_names_she"] if n != slots["F"]]),
        }
    mood, home = rng.choice(WORDS["plot_moods"]), rng.choice(WORDS[f"home_{land}"])
    slots |= {"am": f"{a_or_an(mood)} {hero}", "af": a_or_an(friend), "home": home}
    opening = rng.choice(WORDS["plot_openings"])
    lead = opening.format(**slots) + ("" if "{home}" in opening else f" {slots['N']} lived {home}.")
    return [hero, friend], slots["N"], lead + " " + _fill(rng.choice(PLOTS["heroes"]), slots, rng)


def thing_story(rng: random.Random) -> tuple[list[str], str, str]:
    """(what the story is about, the child's name, the story) about a thing and a child."""
    slots = _slots(rng)
    slots |= {"at": a_or_an(slots["thing"]), "adja": a_or_an(slots["adj"])}
    return [slots["thing"]], slots["N"], _fill(rng.choice(PLOTS["things"]), slots, rng)


def own_story(rng: random.Random) -> tuple[list[str], str, str]:
    """A story of either kind: mostly with a hero."""
    return hero_story(rng) if rng.random() < 0.75 else thing_story(rng)
