"""Streaming text: however tokens are cut, the pieces add up and no character is halved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level

from localmoe.chat.detokenise import Detokeniser

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}
SAMPLES = [
    "Hello, fox. 3 + 4 = 7!\n\n  Indented\tcode",
    "Größe, naïve café",
    "กขคงจฉชซฌญ",
    "日本語の文章です。漢字も",
    "👍🏽👨‍👩‍👧‍👦🇩🇪 ok 🎉🎉🎉",
    "mixed กข abc 日本 x 👍 y",
    "a\u0301e\u0301 combining, \u200bzero width, \ufeffbom",
]

lively_text = st.text(
    st.one_of(st.sampled_from("abc é"), st.characters(exclude_categories=["Cs"])), max_size=40
).filter(lambda text: REPLACEMENT not in text)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def cut(tokens: list[int], sizes: Iterable[int]) -> list[list[int]]:
    """Pieces of the given sizes, the rest one by one."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    return [*pieces, *([token] for token in tokens[start:])]


def stream(tokenizer: Any, pieces: Iterable[list[int]]) -> list[str]:
    detokeniser = Detokeniser(tokenizer)
    return [*(detokeniser.add(piece) for piece in pieces), detokeniser.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=lively_text, sizes=st.lists(st.integers(0, 5), max_size=12))
@example(text="กขคงจฉชซ", sizes=[])
@example(text="👍👍👍👍👍👍👍", sizes=[3, 3, 3])
@settings(max_examples=150)
def test_any_text_streams_out_whole_and_no_character_is_ever_halved(
    kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, cut(tokens, sizes))
    assert "".join(pieces) == decode(tokenizer, tokens) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_text_of_many_scripts_streams_token_by_token(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, cut(tokens, []))
    assert "".join(pieces) == decode(tokenizer, tokens)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing had to be held back to the end


@given(st.lists(st.integers(0, len(byte_level()) - 1), max_size=60), st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=150)
def test_tokens_that_are_no_text_stream_out_as_they_decode(tokens: list[int], sizes: list[int]) -> None:
    tokenizer = byte_level()
    whole, so_far = decode(tokenizer, tokens), ""
    for piece in stream(tokenizer, cut(tokens, sizes)):
        so_far += piece
        assert whole.startswith(so_far)
    assert so_far == whole


@given(st.lists(st.integers(128, 255), max_size=40), st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=150)
def test_broken_bytes_of_a_byte_level_tokenizer_stream_out_as_they_decode(
    broken: list[int], sizes: list[int]
) -> None:
    tokenizer = byte_level()
    tokens = [token for byte in broken for token in single_byte_token(byte)]
    assert "".join(stream(tokenizer, cut(tokens, sizes))) == decode(tokenizer, tokens)


def single_byte_token(byte: int) -> list[int]:
    """The token of one byte, in the printable alphabet of byte-level tokenizers."""
    letters = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in letters]
    letter = chr(byte if byte in letters else 256 + others.index(byte))
    found = byte_level().convert_tokens_to_ids(letter)
    return [] if found is None else [found]


def test_the_tokens_of_a_character_are_held_until_the_last_one() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("👍", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 1
    assert stream(tokenizer, [[token] for token in tokens]) == [*[""] * (len(tokens) - 1), "👍", ""]


def test_a_character_that_never_ends_comes_out_as_a_replacement_at_the_end() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("ok 👍", add_special_tokens=False)["input_ids"][:-1]
    pieces = stream(tokenizer, [[token] for token in tokens])
    assert "".join(pieces[:-1]).startswith("ok")
    assert REPLACEMENT not in "".join(pieces[:-1])
    assert pieces[-1].endswith(REPLACEMENT)
    assert "".join(pieces) == decode(tokenizer, tokens)


class Measured:
    """A tokenizer that remembers how many tokens it decoded at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def decode(self, tokens: Sequence[int], **options: bool) -> str:
        self.most = max(self.most, len(tokens))
        return str(self._tokenizer.decode(tokens, **options))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("again", ["<0xFF>", "a space", "the end"])
def test_a_token_that_comes_again_and_again_is_shown_soon_and_costs_what_the_first_one_did(
    kind: str, again: str
) -> None:
    tokenizer = TOKENIZERS[kind]()
    (word,) = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    (space,) = tokenizer("a ", add_special_tokens=False)["input_ids"][-1:]
    byte = single_byte_token(0xFF)[0] if kind == "byte level" else tokenizer.convert_tokens_to_ids("<0xFF>")
    token = {"<0xFF>": byte, "a space": space, "the end": tokenizer.eos_token_id}[again]
    tokens = [word, *[token] * 300, word, space, word]
    measured = Measured(tokenizer)
    pieces = stream(measured, cut(tokens, []))
    assert "".join(pieces) == decode(tokenizer, tokens)
    assert measured.most < 40
    if again != "the end":
        assert len("".join(pieces[:200])) > 180


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_silent_and_do_not_disturb_what_follows(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    words = tokenizer("one two กข three", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    tokens = [token for word in words for token in (word, *[end] * 9)]
    assert "".join(stream(tokenizer, cut(tokens, []))).split() == decode(tokenizer, tokens).split()
    assert stream(tokenizer, [[end], [end, end]]) == ["", "", ""]


def test_spaces_between_words_survive_every_cut() -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer("a  b   c d", add_special_tokens=False)["input_ids"]
    for size in range(1, len(tokens) + 1):
        pieces = cut(tokens, [size] * (len(tokens) // size))
        assert "".join(stream(tokenizer, pieces)) == "a  b   c d"


def test_nothing_in_nothing_out() -> None:
    assert stream(byte_level(), [[], []]) == ["", "", ""]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_cost_of_a_token_does_not_grow_with_the_answer(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    lengths: list[int] = []

    class Counting:
        def decode(self, tokens: Sequence[int], **options: Any) -> str:
            lengths.append(len(tokens))
            return str(tokenizer.decode(tokens, **options))

    tokens = tokenizer("the fox ran over 日本 and กขค. " * 40, add_special_tokens=False)["input_ids"]
    assert len(tokens) > 500
    stream(Counting(), cut(tokens, []))
    assert max(lengths) <= 40
