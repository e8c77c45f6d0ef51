"""Whatever the target has read and drafts went on with before, the MTP layer drafts as one that has read the
text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.test_mtp_layer import exact_layer
from support.mtp_models import mtp_model
from support.tokenizer import VOCAB_SIZE
from torch import Tensor

from localmoe.core.errors import UnsupportedModelError
from localmoe.model.mtp_draft import MtpDraft, MtpFacts, MtpTarget
from localmoe.model.mtp_layer import MtpLayer

CONTEXT = 400
FACTS = MtpFacts("m", VOCAB_SIZE, CONTEXT)


class Target:
    """Hidden states that are told by the text before: enough to see whether the right ones are used."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._table = torch.randn(VOCAB_SIZE, 128, generator=torch.Generator().manual_seed(2))

    def get_input_embeddings(self) -> Any:
        return lambda ids: self._table[ids]

    def get_output_embeddings(self) -> Any:
        return lambda hidden: hidden

    def hidden(self, text: Sequence[int]) -> Tensor:
        """(T, H): a running mean."""
        rows = self._table.flip(1)[torch.tensor(text)].cumsum(0)
        return rows / torch.arange(1, len(text) + 1)[:, None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    layer, store = exact_layer(mtp_model(tmp_path_factory.mktemp("mtp") / "m", "glm4_moe"))
    with store:
        yield layer, Target(None)


def draft_of(made: tuple[MtpLayer, Target]) -> MtpDraft:
    layer, target = made
    return MtpDraft(FACTS, layer, MtpTarget(target), CONTEXT)


def read_alone(
    made: tuple[MtpLayer, Target], text: list[int], drafted: list[int], seams: Sequence[int] = ()
) -> Tensor:
    """What a layer says that has heard of this text at once. seams: places before which it heard nothing."""
    draft, target = draft_of(made), made[1]
    draft.expect(text)
    ends = [*(seam - 1 for seam in seams), len(text) - 1]
    for start, end in zip([0, *seams], ends, strict=True):
        if end > start:
            draft.hear(start, text[start:end], target.hidden(text[:end])[start:])
    found = draft.next_logits(text)
    for token in drafted:
        text = [*text, token]
        found = draft.next_logits(text)
    assert found is not None
    return found


tokens = st.integers(0, VOCAB_SIZE - 1)
# a turn: so much of the text is kept, this follows it, read in passes of so many; then steps of drafted
# tokens, of which so many are kept
turns = st.tuples(
    st.integers(0, 12), st.lists(tokens, min_size=2, max_size=90), st.integers(1, 80),
    st.lists(st.tuples(st.lists(tokens, max_size=4), st.integers(0, 4), tokens), max_size=3),
)  # fmt: skip


@given(st.lists(turns, min_size=1, max_size=3))
@settings(max_examples=15)
def test_it_says_what_one_says_that_has_read_the_text_alone(made: tuple[MtpLayer, Target], chat: Any) -> None:
    draft, target = draft_of(made), made[1]
    text: list[int] = []
    seams: list[int] = []
    for kept, new, rows, steps in chat:
        kept = min(kept, max(0, len(text) - 1))  # as the target's cache keeps
        seams = [seam for seam in seams if seam <= kept]
        if kept and text[kept] != new[0]:  # what lay before it went with the token that was there
            seams.append(kept)
        text = [*text[:kept], *new]
        draft.expect(text[:-1])
        for start in range(kept, len(text) - 1, rows):
            part = text[start : min(start + rows, len(text) - 1)]
            draft.hear(start, part, target.hidden(text[: start + len(part)])[start:])
        for drafted, accepted, following in steps:
            for count in range(len(drafted) + 1):
                found = draft.next_logits([*text, *drafted[:count]])
                assert found is not None
                if count in (0, len(drafted)):
                    missing = sorted({*range(1, len(text))} - {*draft._entries})
                    assert {*missing} <= {*seams}
                    wanted = read_alone(made, text, drafted[:count], missing)
                    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            start, window = len(text) - 1, [text[-1], *drafted]
            draft.hear(start, window, target.hidden([*text, *drafted])[start:])
            if drafted[accepted : accepted + 1] == [following]:
                following = (following + 1) % VOCAB_SIZE  # it was rejected
            text = [*text, *drafted[:accepted], following]
    draft.forget()
    assert draft.next_logits([5, 6]) is None, "nobody has told what lies before"


def test_steps_without_drafts_cost_nothing_but_some_rows(made: tuple[MtpLayer, Target]) -> None:
    draft, target = draft_of(made), made[1]
    text = [int(at * 7 % 200) for at in range(200)]
    draft.expect(text[:2])
    draft.hear(0, text[:2], target.hidden(text[:2]))
    for at in range(2, 199):
        draft.hear(at, text[at : at + 1], target.hidden(text[: at + 1])[at:])
        assert sum(len(rows) for _, rows in draft._rows) <= 66
    found = draft.next_logits(text)
    assert found is not None
    torch.testing.assert_close(found, read_alone(made, text, []), rtol=1e-3, atol=1e-3)


def test_what_fails_is_named_and_leaves_what_was_read(
    made: tuple[MtpLayer, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = draft_of(made), made[1]
    text = [4, 9, 30, 7, 12]
    draft.expect(text)
    draft.hear(0, text[:4], target.hidden(text[:4]))
    with monkeypatch.context() as patched:
        patched.setattr(MtpLayer, "run", lambda *arguments: 1 / 0)
        with pytest.raises(UnsupportedModelError, match="MTP layer of m cannot run"):
            draft.next_logits(text)
    assert draft.next_logits(text) is None
    draft.hear(4, text[4:], target.hidden(text)[4:])  # the target goes on
    assert draft.next_logits([*text, 8]) is not None
