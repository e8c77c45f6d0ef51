"""The demo model's sources: kind, share of the training mix, group in the card, title and licence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One group of documents. share: of all training tokens. answers_only: the user's words carry no loss."""

    name: str
    kind: str  # "text" or "chat"
    share: float
    group: str  # the line of the card's perplexity table
    title: str
    licence: str
    answers_only: bool = False
    max_chars: int = 0  # 0 = all of it


SOURCES = (
    Source(
        "tinystories_sample",
        "text",
        0.015,
        "TinyStories",
        "TinyStories (sample; Eldan and Li)",
        "CDLA-Sharing-1.0",
    ),
    Source(
        "african_storybook_en",
        "text",
        0.006,
        "storybooks",
        "African Storybook, English",
        "CC BY; authors in ATTRIBUTION.md",
    ),
    Source(
        "pratham_books_en",
        "text",
        0.01,
        "storybooks",
        "Pratham Books StoryWeaver, English",
        "CC BY; authors in ATTRIBUTION.md",
    ),
    Source(
        "fairytale_stories",
        "text",
        0.035,
        "fairy tales",
        "FairytaleQA stories",
        "Apache-2.0; stories public domain",
    ),
    Source(
        "folk_and_fairy_tales",
        "text",
        0.07,
        "fairy tales",
        "18 collections of folk and fairy tales (Project Gutenberg)",
        "public domain",
    ),
    Source(
        "classic_childrens_books",
        "text",
        0.13,
        "children's books",
        "classic children's books, up to 1928",
        "public domain (US)",
    ),
    Source(
        "classic_novels",
        "text",
        0.06,
        "novels",
        "classic novels, 1780 to 1928 (a part)",
        "public domain (US)",
        max_chars=9_000_000,
    ),
    Source(
        "self_dialogue",
        "chat",
        0.14,
        "dialogues",
        "self-dialogue corpus",
        "BSD-3-Clause, Copyright (c) 2017 its authors",
    ),
    Source(
        "topical_chat",
        "chat",
        0.045,
        "dialogues",
        "Topical-Chat (Amazon), valid and test parts",
        "CDLA-Sharing-1.0",
    ),
    Source(
        "synthetic_persona_chat",
        "chat",
        0.03,
        "persona chat",
        "Synthetic-Persona-Chat (Google), valid and test parts",
        "CC BY 4.0",
    ),
    Source(
        "ms_personality_chat",
        "chat",
        0.005,
        "bot small talk",
        "BotBuilder PersonalityChat",
        "MIT, Copyright (c) Microsoft Corporation",
        answers_only=True,
    ),
    Source(
        "chatterbot_corpus_en",
        "chat",
        0.001,
        "bot small talk",
        "ChatterBot corpus, English",
        "BSD-3-Clause, Copyright (c) 2017 Gunther Cox",
        answers_only=True,
    ),
    Source("arithmetic_synthetic", "chat", 0.015, "sums", "generated sums", "CC0", answers_only=True),
    Source(
        "gsm8k_train", "chat", 0.03, "word problems", "GSM8K, training part", "MIT, Copyright (c) 2021 OpenAI"
    ),
    Source("svamp", "chat", 0.003, "word problems", "SVAMP", "MIT, Copyright (c) 2021 Arkil Patel"),
    Source(
        "python_code",
        "text",
        0.035,
        "code",
        "TheAlgorithms/Python, keon/algorithms, geekcomputers/Python",
        "MIT, Copyright (c) 2016-2022 TheAlgorithms and contributors; 2017 Keon; 2018 Craig Richards",
    ),
    Source("mbpp_train", "chat", 0.002, "code", "MBPP, tasks 511 to 974 (Google Research)", "CC BY 4.0"),
    Source(
        "oasst_en_100", "chat", 0.005, "dialogues", "Open-Assistant, 100 English trees (LAION)", "Apache-2.0"
    ),
    Source("self_instruct_seed", "chat", 0.001, "dialogues", "Self-Instruct seed tasks", "Apache-2.0"),
    Source(
        "own_small_talk",
        "chat",
        0.12,
        "own small talk",
        "own small talk, whole conversations",
        "Apache-2.0 (this project)",
        answers_only=True,
    ),
    Source(
        "own_single",
        "chat",
        0.04,
        "own small talk",
        "own small talk and facts, one question each",
        "Apache-2.0 (this project)",
        answers_only=True,
    ),
    Source("own_sums", "chat", 0.04, "sums", "own sums", "Apache-2.0 (this project)", answers_only=True),
    Source(
        "own_names",
        "chat",
        0.025,
        "own small talk",
        "own chats that remember a name",
        "Apache-2.0 (this project)",
        answers_only=True,
    ),
    Source(
        "own_plots",
        "chat",
        0.12,
        "own stories on request",
        "own stories on request, from plots with slots",
        "Apache-2.0 (this project)",
        answers_only=True,
    ),
    Source(
        "own_stories",
        "chat",
        0.02,
        "corpus stories on request",
        "requests for TinyStories and storybook stories, some with another animal or name",
        "as those stories",
        answers_only=True,
    ),
)
# Tale collections only: the other files of folk_and_fairy_tales are scholarly or carry a wrong title.
TALE_FILES = (
    "pg503_",
    "pg640_",
    "pg7017_",
    "pg30580_",
    "pg3833_",
    "pg17208_",
    "pg29021_",
    "pg22373_",
    "pg2591_",
    "pg5314_",
    "pg11339_",
    "pg28_",
    "pg7128_",
    "pg7439_",
    "pg35665_",
    "pg34206_",
    "pg39195_",
    "pg12814_",
)
STORY_SOURCES = ("tinystories_sample", "african_storybook_en", "pratham_books_en")
ATTRIBUTED = ("african_storybook_en", "pratham_books_en")  # CC BY: every story's people are named
