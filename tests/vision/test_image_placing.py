"""Where pictures stand in prompts, and by which places attention turns their tokens, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.vision_models import BY_GRID, IMAGE_TOKEN_ID, vision_model

from localmoe.vision.image_reader import ImageLayout
from localmoe.vision.placing import ImageNumbers, coordinates, place_images

MODELS = {name: vision_model(name).model for name in BY_GRID}
LAYOUTS = st.builds(
    ImageLayout, st.binary(min_size=32, max_size=32), height=st.integers(1, 7), width=st.integers(1, 7)
)
# texts between pictures are never empty: transformers takes neighbours for one picture
PIECES = st.lists(st.tuples(st.integers(1, 5), LAYOUTS), max_size=4)


def prompt_of(pieces: list[tuple[int, ImageLayout]]) -> list[int]:
    ids: list[int] = []
    for words, layout in pieces:
        ids += [10 + word for word in range(words)] + [IMAGE_TOKEN_ID] * layout.tokens
    return [*ids, 20, 21]


@pytest.mark.parametrize("architecture", BY_GRID)
@given(pieces=PIECES)
def test_places_are_those_of_transformers(architecture: str, pieces: list[tuple[int, ImageLayout]]) -> None:
    prompt, layouts = prompt_of(pieces), [layout for _, layout in pieces]
    placed = place_images(prompt, IMAGE_TOKEN_ID, layouts)
    ids = torch.tensor([prompt])
    grid = torch.tensor([[1, 2 * one.height, 2 * one.width] for one in layouts]).reshape(-1, 3)
    wanted, delta = MODELS[architecture].get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE_TOKEN_ID).int(), image_grid_thw=grid
    )
    found = coordinates(placed, len(prompt))
    np.testing.assert_array_equal(found, wanted[:, 0].numpy())
    assert found.max() + 1 == len(prompt) + int(delta)


@given(pieces=PIECES, other=st.binary(min_size=1, max_size=32))
def test_texts_with_other_pictures_are_told_apart(
    pieces: list[tuple[int, ImageLayout]], other: bytes
) -> None:
    """However alike their hashes are."""
    prompt, layouts = prompt_of(pieces), [layout for _, layout in pieces]
    placed, numbers = place_images(prompt, IMAGE_TOKEN_ID, layouts), ImageNumbers()
    ids = numbers.told_apart(prompt, placed)
    assert len(ids) == len(prompt) and np.array(ids, dtype=np.int64).tolist() == ids
    words = [token for token in prompt if token != IMAGE_TOKEN_ID]
    assert [token for token in ids if token < 1 << 40] == words  # no picture's number is a token's
    for index, layout in enumerate(layouts):
        digest = layout.digest[: -len(other)] + other
        changed = [*layouts]
        changed[index] = ImageLayout(digest, layout.height, layout.width)
        anew = numbers.told_apart(prompt, place_images(prompt, IMAGE_TOKEN_ID, changed))
        start, end = placed[index].start, placed[index].end
        assert anew[:start] == ids[:start] and anew[end:] == ids[end:]
        if digest == layout.digest:
            assert anew == ids
        elif changed[index] not in layouts:
            assert not set(anew[start:end]) & set(ids)
    assert numbers.told_apart(prompt, placed) == ids


def test_pictures_without_a_word_between_them_are_split_by_their_sizes() -> None:
    layouts = [ImageLayout(b"a" * 32, 1, 3), ImageLayout(b"b" * 32, 2, 1)]
    placed = place_images([5, *[IMAGE_TOKEN_ID] * 5, 6], IMAGE_TOKEN_ID, layouts)
    assert [(one.start, one.end) for one in placed] == [(1, 4), (4, 6)]
