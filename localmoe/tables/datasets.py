"""The prompts that tables are measured with: five public datasets, in assets/prompts. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from localmoe.core.config import GenerationRequest
from localmoe.core.errors import ConfigError
from localmoe.core.prompts import Prompt, read_prompts
from localmoe.core.types import Message
from localmoe.tables.cells import MIXED

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A set of prompts. title: for people. continued: texts to go on with as they are, not questions."""

    name: str
    title: str
    continued: bool = False

    def prompts(self, limit: int) -> list[Prompt]:
        """The first `limit`.

        Raises:
            ConfigError: the file is not there, or damaged.
        """
        return read_prompts(FOLDER / f"{self.name}.jsonl", limit)

    def request(self, prompt: Prompt, max_new_tokens: int) -> GenerationRequest:
        """A question in the chat template, or a text to continue."""
        if self.continued:
            return GenerationRequest(prompt=prompt.text, max_new_tokens=max_new_tokens)
        return GenerationRequest(messages=(Message("user", prompt.text),), max_new_tokens=max_new_tokens)


_ALL = (
    Dataset("humaneval", "HumanEval"),
    Dataset("gsm8k", "GSM8K"),
    Dataset("mt_bench", "MT-Bench"),
    Dataset("wikitext2", "WikiText-2", continued=True),
    Dataset("c4", "C4", continued=True),
)
DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})


def check_datasets(names: Sequence[str]) -> tuple[str, ...]:
    """The names themselves, without repeats, if there are such datasets.

    Raises:
        ConfigError: there is no dataset of a name, or none is named.
    """
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"There is no dataset '{name}': choose from {', '.join(DATASETS)}.")
    return tuple(dict.fromkeys(names))


def requests(name: str, datasets: Sequence[str], limit: int, max_new_tokens: int) -> list[GenerationRequest]:
    """The requests of a dataset, or of "mixed": the first few of each, about as many as of two datasets.

    Raises:
        ConfigError: a file is not there, or damaged.
    """
    if name != MIXED:
        chosen, each = [name], limit
    else:
        chosen, each = list(datasets), max(1, 2 * limit // len(datasets))
    return [
        DATASETS[dataset].request(prompt, max_new_tokens)
        for dataset in chosen
        for prompt in DATASETS[dataset].prompts(each)
    ]


def title_of(name: str) -> str:
    """For people."""
    return DATASETS[name].title if name in DATASETS else name
