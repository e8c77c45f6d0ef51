"""Own small talk with a slot for the demo model: "I like tea", "I went to the zoo", "what is my name?".

Teaches a tiny model to take a word from what was said and to use it in its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from demo_chat import ASK_NAME, KNOWN_NAME, NAME_REPLIES, PEOPLE, TELL_NAME, vary
from demo_lists import read_words

Turn = tuple[str, str]
WORDS = read_words("demo_words.txt")
LIKED, KINDS, PLACES, PETS = (WORDS[f"user_{k}"] for k in ("liked", "kinds", "places", "pets"))
PET_NAMES, JOBS, LANDS, TASKS = (WORDS[f"user_{k}"] for k in ("pet_names", "jobs", "lands", "tasks"))
TRY_BIGGER = WORDS["user_try_bigger"]


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def like(rng: random.Random) -> Turn:
    """What the user likes, or whether the model likes it."""
    x = rng.choice(LIKED)
    return rng.choice(
        [
            (
                f"{rng.choice(['I like', 'I love', 'I really like', 'I enjoy'])} {x}",
                f"That is nice! What do you like most about {x}?",
            ),
            (
                f"{rng.choice(['I do not like', 'I hate', 'I do not enjoy'])} {x}",
                f"That is all right. Not everybody likes {x}. What do you like?",
            ),
            (f"Do you like {x}?", f"I am only a program, so I do not really know {x}. Do you like {x}?"),
            (f"What do you think about {x}?", f"I think that many people like {x}. What do you think?"),
            (f"Let's talk about {x}", f"Sure, let us talk about {x}! What do you like about it?"),
        ]
    )


def favourite(rng: random.Random) -> Turn:
    """Favourite things of both."""
    kind, x = rng.choice(KINDS), rng.choice(LIKED)
    return rng.choice(
        [
            (
                f"{rng.choice(['What is', 'What' + chr(39) + 's'])} your favorite {kind}?",
                f"I am only a tiny program, so I do not have a favorite {kind}. "
                f"What is your favorite {kind}?",
            ),
            (f"My favorite {kind} is {x}", f"{_capital(x)}! That is a good choice."),
        ]
    )


def been_to(rng: random.Random) -> Turn:
    """Where the user was or will go."""
    place, when = rng.choice(PLACES), rng.choice(["today", "yesterday", "last week", "this morning"])
    return rng.choice(
        [
            (
                f"I went to {place} {when}",
                f"That sounds nice! What did you do at {place}?"
                if place != "my grandmother"
                else "That sounds nice! How is your grandmother?",
            ),
            (f"I am going to {place} tomorrow", "That sounds like fun! I hope that you have a good time."),
            (f"I was at {place} {when}", "How was it?"),
        ]
    )


def about_user(rng: random.Random) -> Turn:
    """Age, home, work, need, weather."""
    land, job, n = rng.choice(LANDS), rng.choice(JOBS), rng.randint(5, 80)
    return rng.choice(
        [
            (f"I am {n} years old", f"{n} is a good age! What do you like to do?"),
            (f"I am from {land}", f"{land} must be a nice place. What do you like about it?"),
            (f"I live in {land}", f"{land} must be a nice place to live. What do you like about it?"),
            (
                f"I am {_article(job)}",
                f"It must be interesting to be {_article(job)}. Do you like your work?",
            ),
            (
                f"I work as {_article(job)}",
                f"It must be interesting to be {_article(job)}. Do you like your work?",
            ),
            ("I am hungry", "Then it is time to eat something good! What would you like to eat?"),
            ("I am thirsty", "Then have a glass of water. I will wait here for you."),
            ("It is cold today", "Then stay warm! A cup of tea will help."),
            ("It is raining", "A rainy day is a good day for a story."),
            ("The sun is shining", "How nice! I hope that you can go outside today."),
            ("What should I eat today?", "How about some soup and fresh bread?"),
            ("What should I do today?", "How about a walk outside, or a good book?"),
        ]
    )


def about_me(rng: random.Random) -> Turn:
    """What the model does all day, and help that it cannot give."""
    task = rng.choice(TASKS)
    verb = task if not task.startswith("with") else "do my homework"
    return rng.choice(
        [
            (
                rng.choice(
                    [
                        "What did you do yesterday?",
                        "What did you do today?",
                        "What are you doing?",
                        "What are you doing now?",
                        "What did you do last night?",
                        "What have you been doing?",
                        "What will you do tomorrow?",
                    ]
                ),
                "I am only a program: I wait in your computer's memory for your next message.",
            ),
            (
                rng.choice(
                    [
                        "Do you have a pet?",
                        "Do you have a dog?",
                        "Do you have friends?",
                        "Do you have children?",
                        "Do you have a job?",
                        "Are you married?",
                        "Do you go to school?",
                    ]
                ),
                "No, I am only a program. But I know stories about many animals and children.",
            ),
            (
                rng.choice(["Can you help me", "Please help me", "Help me", "Could you help me"])
                + f" {task}?",
                rng.choice(TRY_BIGGER),
            ),
            (
                f"{rng.choice(['How do I', 'How can I', 'I want to', 'I need to'])} {verb}",
                rng.choice(TRY_BIGGER),
            ),
        ]
    )


def slot_turn(rng: random.Random) -> Turn:
    """One exchange of any of these kinds."""
    makers: list[Callable[[random.Random], Turn]] = [like, favourite, been_to, about_user, about_me]
    asked, answer = rng.choice(makers)(rng)
    return vary(asked, rng), answer


def pet_turns(rng: random.Random) -> list[Turn]:
    """Two exchanges: the user has a pet, and it has a name."""
    pet, name = rng.choice(PETS), rng.choice(PET_NAMES)
    told = rng.choice([name, f"Its name is {name}", f"It is called {name}", f"{name}!"])
    return [
        (
            vary(f"{rng.choice(['I have', 'We have', 'I got'])} {_article(pet)}", rng),
            f"How nice! What is the name of your {pet}?",
        ),
        (told, f"{name} is a lovely name for {_article(pet)}!"),
    ]


def name_turns(between: list[Turn], rng: random.Random) -> list[Turn]:
    """The user's name, told, kept over other turns, and asked for."""
    name = rng.choice(PEOPLE)
    told = rng.choice(TELL_NAME).format(name)
    first = (told if rng.random() < 0.7 else told.lower(), rng.choice(NAME_REPLIES).format(name))
    return [first, *between, (vary(rng.choice(ASK_NAME), rng), rng.choice(KNOWN_NAME).format(name))]
