"""A toy language model: what follows depends on the last two tokens, by a table for target and for draft."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from localmoe.core.events import Event
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.model.runner import ModelRunner

VOCAB = 4


class Table:
    """Distributions (V,) by the last two tokens. `agreement` 1 makes the draft equal to the target."""

    def __init__(self, *, agreement: float = 0.4, vocab: int = VOCAB, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.rows: dict[str, dict[tuple[int, ...], Tensor]] = {"target": {}, "draft": {}}
        contexts = [(), *((a,) for a in range(vocab)), *itertools.product(range(vocab), repeat=2)]
        for context in contexts:
            target = torch.softmax(1.5 * torch.randn(vocab, generator=generator), 0)
            other = torch.softmax(1.5 * torch.randn(vocab, generator=generator), 0)
            self.rows["target"][context] = target
            self.rows["draft"][context] = agreement * target + (1 - agreement) * other

    def target(self, tokens: Sequence[int]) -> Tensor:
        return self.rows["target"][tuple(tokens[-2:])]

    def draft(self, tokens: Sequence[int]) -> Tensor:
        return self.rows["draft"][tuple(tokens[-2:])]

    def joint(self, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
        """The target's probability of every continuation of that length."""
        result = {}
        for tokens in itertools.product(range(self.vocab), repeat=length):
            probability = 1.0
            for i, token in enumerate(tokens):
                probability *= float(self.target([*prompt, *tokens[:i]])[token])
            result[tokens] = probability
        return result

    def greedy(self, prompt: Sequence[int], count: int, end: frozenset[int] = frozenset()) -> list[int]:
        """What plain greedy decoding of the target writes."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.target(tokens).argmax()))
            if tokens[-1] in end:
                break
        return tokens[len(prompt) :]


class Rule:
    """A grammar of a toy model: what may follow depends on the last token and on where the text is."""

    def __init__(self, table: Table, seed: int, forces: float = 0.0) -> None:
        """forces: how often one token alone may follow, beside where chance has it."""
        chance = random.Random(seed)
        self.vocab = table.vocab

        def many() -> int:
            return 1 if forces and chance.random() < forces else chance.randint(1, table.vocab)

        self.may = {
            (token, odd): frozenset(chance.sample(range(table.vocab), many()))
            for token in range(table.vocab)
            for odd in (0, 1)
        }

    def allowed(self, text: Sequence[int], count: int) -> Tensor | None:
        may = self.may[text[-1], len(text) % 2]
        return torch.tensor([token in may for token in range(count)])

    def valid(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        written = list(text)
        for token in tokens:
            if token not in self.may[written[-1], len(written) % 2]:
                break
            written.append(token)
        return len(written) - len(text)

    def free(self, text: Sequence[int]) -> bool:
        return len(self.may[text[-1], len(text) % 2]) == self.vocab

    def forced(self, text: Sequence[int]) -> list[int]:
        """Where one token alone may follow, it and what alone may follow it."""
        found: list[int] = []
        while len(may := self.may[(found or text)[-1], (len(text) + len(found)) % 2]) == 1 and len(found) < 9:
            found += may
        return found

    def scaled(self, table: Table, text: Sequence[int]) -> Tensor:
        """The target's distribution of what may follow."""
        allowed = self.allowed(text, self.vocab)
        assert allowed is not None
        kept = table.target(text) * allowed
        return kept / kept.sum()

    def greedy(self, table: Table, prompt: Sequence[int], count: int, end: frozenset[int]) -> list[int]:
        """What plain greedy decoding writes that asks it before each token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.scaled(table, tokens).argmax()))
            if tokens[-1] in end:
                break
        return tokens[len(prompt) :]


class TokenState:
    """A sequence state that remembers the tokens themselves."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_bytes = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def keepable(self, length: int) -> int:
        return min(length, len(self.tokens))

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]


class TableRunner:
    """The real ModelRunner around a table; notes every pass and every event, and can break."""

    def __init__(self, table: Table, *, max_rows: int = 65) -> None:
        self.table = table
        self.events: list[Event] = []
        self.passes_run: list[tuple[str, int]] = []
        self.break_at: int | None = None  # the n-th pass raises, half-way
        self.state = TokenState()
        self.passes = SimpleNamespace(
            counters=GenerationCounters(),
            timeline=None,
            memory=None,
            lookahead=LookaheadBuffer(1),
            scheduler=SimpleNamespace(notify=self.events.append),
            rows=SimpleNamespace(multiple=1, max_rows=max_rows),
            phase="prefill",
            live_rows=0,
            draft_token=0,
            synthetic=None,
            forced_index=None,
            recorder=None,
            linears=None,
        )
        self.runner = ModelRunner(self, self.state, self.passes, torch.device("cpu"))  # type: ignore[arg-type]

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int, **_: Any) -> Any:
        phase, ids = self.passes.phase, input_ids[0].tolist()
        assert position_ids[0].tolist() == list(range(self.state.length, self.state.length + len(ids)))
        self.passes_run.append((phase, len(ids)))
        rows = []
        for i, token in enumerate(ids):
            if self.break_at == len(self.passes_run) and i == len(ids) // 2:
                raise RuntimeError("the pass broke")
            self.state.tokens.append(token)
            distribution = self.table.draft if phase == "draft" else self.table.target
            rows.append(distribution(self.state.tokens).log())
        return SimpleNamespace(logits=torch.stack(rows)[-logits_to_keep:][None])

    __call__ = forward  # as models are called
