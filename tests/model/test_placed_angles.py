"""Tabulated rotary embeddings of texts whose tokens are turned by other places than their own, against
transformers' own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_config
from support.vision_models import BY_GRID, vision_model
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from localmoe.model.rotary import place_angles, tabulate

CONTEXT = 24
OWN = {name: vision_model(name).model.language_model.rotary_emb for name in BY_GRID}
COORDINATES = st.integers(1, CONTEXT).flatmap(
    lambda count: st.lists(st.tuples(*[st.integers(0, CONTEXT - 1)] * 3), min_size=count, max_size=count)
)


@pytest.mark.parametrize("architecture", BY_GRID)
@given(texts=st.lists(st.none() | COORDINATES, min_size=1, max_size=4), first=st.integers(0, CONTEXT - 1))
def test_angles_are_those_of_a_texts_own_places(
    architecture: str, texts: list[list[tuple[int, int, int]] | None], first: int
) -> None:
    own, made = OWN[architecture], copy.deepcopy(OWN[architecture])
    tabulate(made, CONTEXT, torch.float32)
    x = torch.zeros(1, 1, 8)
    for index, text in enumerate(texts):  # one after the other: tables change where they lie
        places = torch.arange(CONTEXT).expand(3, -1)
        if text is not None:
            known = torch.tensor(text).T
            behind = int(known.max()) + 1 + torch.arange(CONTEXT - known.shape[1])
            places = torch.cat((known, behind.expand(3, -1)), dim=1)
        if index:  # not before the first pass, which makes the tables
            made(x, torch.arange(3).expand(3, 1, 3))
        place_angles(made, None if text is None else np.array(text, dtype=np.int64).T)
        count = CONTEXT - first
        found = made(x, torch.arange(first, CONTEXT).expand(3, 1, count))
        for part, wanted in zip(found, own(x, places[:, None, first:]), strict=True):
            assert torch.equal(part, wanted)


def test_embeddings_that_know_one_place_of_a_token_stay_as_they_are() -> None:
    module = Qwen3MoeRotaryEmbedding(tiny_config("qwen3_moe"))
    own = Qwen3MoeRotaryEmbedding(tiny_config("qwen3_moe"))
    tabulate(module, CONTEXT, torch.float32)
    x, places = torch.zeros(1, 1, 8), torch.arange(CONTEXT)[None]
    module(x, places)
    place_angles(module, np.full((3, 4), 2))
    assert all(map(torch.equal, module(x, places), own(x, places)))
