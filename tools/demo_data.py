"""The demo model's corpus: reads and cleans the sources, splits them into training and held-out documents.

Reads *.jsonl.gz of {"messages"} or {"text"} lines; turning documents into tokens is demo_tokens.py's job.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from pathlib import Path

import demo_dialogues
import demo_plots
import demo_stories
from demo_sources import ATTRIBUTED, SOURCES, STORY_SOURCES, TALE_FILES, Source

HELD_OUT_SHARE = 0.03
CHUNK_CHARS = 3000  # a piece of a long text: about 800 tokens
SHINGLE_WORDS = 12
OWN_COUNTS = {
    "own_small_talk": 12_000,
    "own_single": 8_000,
    "own_sums": 14_000,
    "own_names": 3_000,
    "own_plots": 26_000,
}

Document = str | list[dict[str, str]]
Splits = tuple[list[Document], list[Document]]  # training, held out
_PLAIN = {
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2026": "...",
    "\u2013": "-",
    "\u2014": " - ",
    "\u00a0": " ",
    "\u2212": "-",
    "\r": "",
    "\ufeff": "",
}
_PLAIN_TABLE = str.maketrans(_PLAIN)


def clean(text: str) -> str:
    """Plain quotes and dashes, no runs of spaces within a line, at most one empty line."""
    text = text.translate(_PLAIN_TABLE)
    text = re.sub(r"(?<=\S)[ \t]{2,}", " ", text)
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", text).strip()


def read_source(data: Path, source: Source) -> list[Document]:
    """All documents of one file, cleaned; chats start with the user and alternate."""
    documents: list[Document] = []
    total = 0
    with gzip.open(data / f"{source.name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if source.kind == "text":
                if source.name == "folk_and_fairy_tales" and not any(
                    mark in row["path"] for mark in TALE_FILES
                ):
                    continue
                text = row["text"] if source.name == "python_code" else clean(row["text"])
                documents.append(text)
                total += len(text)
                if source.max_chars and total >= source.max_chars:
                    break
            else:
                messages = [{"role": m["role"], "content": clean(m["content"])} for m in row["messages"]]
                while messages and messages[0]["role"] == "assistant":
                    messages.pop(0)
                if len(messages) >= 2:
                    documents.append(messages)
    return documents


def split_source(documents: list[Document]) -> Splits:
    """Holds out the documents with the smallest hashes (at least one): the same ones on every machine."""
    order = sorted(range(len(documents)), key=lambda i: hashlib.sha256(repr(documents[i]).encode()).digest())
    held = set(order[: max(1, round(HELD_OUT_SHARE * len(documents)))])
    return [d for i, d in enumerate(documents) if i not in held], [documents[i] for i in sorted(held)]


def chunk(text: str) -> list[str]:
    """A text in pieces of at most about CHUNK_CHARS, cut between lines."""
    pieces, current = [], ""
    for line in text.split("\n"):
        if current and len(current) + len(line) > CHUNK_CHARS:
            pieces.append(current.strip("\n"))
            current = ""
        current += line + "\n"
    return [p for p in [*pieces, current.strip("\n")] if len(p) > 40]


def shingles(text: str, step: int) -> set[int]:
    """Hashes of runs of SHINGLE_WORDS words, one run starting every `step` words."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {
        hash(tuple(words[i : i + SHINGLE_WORDS]))
        for i in range(0, max(1, len(words) - SHINGLE_WORDS + 1), step)
    }


def held_shingles(splits: dict[str, Splits]) -> set[int]:
    """The word runs of all held-out text."""
    texts = [piece for s in SOURCES if s.kind == "text" for piece in splits[s.name][1]]
    return set().union(*(shingles(str(piece), 1) for piece in texts))


def overlaps(text: str, held: set[int]) -> bool:
    """Whether more than a tenth of a text's word runs are held out."""
    marks = shingles(text, 5)
    return 10 * len(marks & held) > len(marks)


def drop_overlaps(splits: dict[str, Splits]) -> set[int]:
    """Cuts texts into pieces, drops training pieces that overlap held-out text; returns the held-out runs."""
    for source in SOURCES:
        if source.kind == "text":
            train, valid = splits[source.name]
            splits[source.name] = (
                [p for d in train for p in chunk(str(d))],
                [p for d in valid for p in chunk(str(d))],
            )
    held = held_shingles(splits)
    dropped = 0
    for source in SOURCES:
        if source.kind == "text":
            train, valid = splits[source.name]
            kept = [piece for piece in train if not overlaps(str(piece), held)]
            dropped += len(train) - len(kept)
            splits[source.name] = (kept, valid)
    print(f"dropped {dropped} training pieces that overlap held-out text", flush=True)
    return held


def story_documents(texts: list[str], copies: int, rng: random.Random) -> list[Document]:
    """Chats that ask for these stories, each story in several versions."""
    out: list[Document] = []
    for text in texts:
        if (story := demo_stories.fit(text)) is not None:
            for version in demo_stories.versions(story, copies, rng):
                out.append(demo_dialogues.story_chat(demo_stories.story_turn(version, rng), rng))
    return out


def own_documents(stories: list[str], seed: int, share: float, copies: int) -> dict[str, list[Document]]:
    """The project's own chats; `stories` are the only ones that may be told in them."""
    rng = random.Random(seed)
    fitting = [s for s in map(demo_stories.fit, stories) if s is not None]

    def tell() -> tuple[str, str]:
        if rng.random() < 0.95:
            return demo_stories.plot_turn(*demo_plots.own_story(rng), rng)
        return demo_stories.story_turn(rng.choice(demo_stories.versions(rng.choice(fitting), 1, rng)), rng)

    counts = {name: max(40, int(n * share)) for name, n in OWN_COUNTS.items()}
    return {
        "own_small_talk": [demo_dialogues.small_talk(rng, tell) for _ in range(counts["own_small_talk"])],
        "own_single": [demo_dialogues.single(rng) for _ in range(counts["own_single"])],
        "own_sums": [demo_dialogues.sums(rng) for _ in range(counts["own_sums"])],
        "own_names": [demo_dialogues.names(rng, tell) for _ in range(counts["own_names"])],
        "own_plots": [
            demo_dialogues.story_chat(demo_stories.plot_turn(*demo_plots.own_story(rng), rng), rng)
            for _ in range(counts["own_plots"])
        ],
        "own_stories": story_documents(stories, copies, rng),
    }


def load_corpus(data: Path, seed: int = 1) -> dict[str, Splits]:
    """Training and held-out documents of every source; nothing held out also appears in training."""
    splits = {s.name: split_source(read_source(data, s)) for s in SOURCES if not s.name.startswith("own_")}
    # whole stories before they are cut: a request is answered with a whole one
    whole = {name: splits[name] for name in STORY_SOURCES}
    held = drop_overlaps(splits)
    stories = [str(d) for name in STORY_SOURCES for d in whole[name][0]]
    train = own_documents([s for s in stories if not overlaps(s, held)], seed, 1.0, copies=2)
    held_stories = [str(d) for name in STORY_SOURCES for d in whole[name][1]]
    valid = own_documents(held_stories, seed + 1, HELD_OUT_SHARE, copies=0)
    for name in train:
        splits[name] = (train[name], valid[name])
    for name, (kept, held_documents) in splits.items():
        seen = {repr(d) for d in kept}
        splits[name] = (kept, [d for d in held_documents if repr(d) not in seen])
    return splits


def attribution(data: Path) -> str:
    """Who wrote, drew and translated each CC BY story, as its publisher gives it."""
    lines = ["# Stories used under CC BY", ""]
    for name in ATTRIBUTED:
        title = next(s.title for s in SOURCES if s.name == name)
        lines += [f"## {title}", ""]
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as rows:
            for row in map(json.loads, rows):
                people = (
                    row["attribution"]
                    .replace("* License: [CC-BY] | ", "")
                    .replace("* ", "")
                    .replace(" | ", "; ")
                )
                lines.append(f"- {row['text'].strip().splitlines()[0][:80]}: {people}")
        lines.append("")
    return "\n".join(lines)
