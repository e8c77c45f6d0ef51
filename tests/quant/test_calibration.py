"""Calibration texts: what is read, what is refused, and how it is cut into sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.errors import DraftError
from localmoe.quant.calibration import (
    BUILT_IN,
    LEAST_SEQUENCES,
    CalibrationText,
    cut_sequences,
    read_calibration,
)


def bytes_of(text: str) -> list[int]:
    """A tokenizer that begins every document with a token of its own."""
    return [1000, *text.encode()]


def json_lines(path: Path, texts: Sequence[str], *, ascii_only: bool = False, end: str = "\n") -> Path:
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=ascii_only) for i, text in enumerate(texts)]
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def digest_of(texts: Sequence[str]) -> str:
    """SHA-256 over each document's length, eight bytes with the lowest first, and its UTF-8."""
    whole = b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts)
    return hashlib.sha256(whole).hexdigest()


def test_the_built_in_text_has_documents_enough_for_the_default_calibration() -> None:
    text = read_calibration()
    lines = [json.loads(line)["text"] for line in BUILT_IN.read_text("utf-8").split("\n") if line]
    assert list(text.documents) == lines and len(lines) > 50
    assert (text.name, text.digest) == ("built-in, several domains", digest_of(lines))
    assert sum(map(len, lines)) > 6 * 65536, "characters; a token has about four"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=6), st.booleans())
@settings(max_examples=60)
def test_every_document_of_a_json_lines_file_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool
) -> None:
    file = tmp_path_factory.mktemp("text") / "own.jsonl"
    text = read_calibration(json_lines(file, texts, ascii_only=ascii_only))
    written = [text for text in texts if text.strip()]
    assert list(text.documents) == written
    assert (text.name, text.digest) == ("own.jsonl", digest_of(written))


def test_a_text_may_hold_line_ends_of_unicode_and_the_file_those_of_windows_and_a_byte_order_mark(
    tmp_path: Path,
) -> None:
    texts = ["one\u2028two\x85three\x0b\x0c", "four\r\nfive"]
    file = json_lines(tmp_path / "own.jsonl", texts, end="\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes() + b"\r\n  \r\n")
    assert list(read_calibration(file).documents) == texts


def test_any_other_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text('{"text": "one"}\n{"text": "two"}\n', "utf-8")
    text = read_calibration(file)
    assert text.documents == ('{"text": "one"}\n{"text": "two"}\n',)
    assert text.digest == digest_of(text.documents)


def test_the_digest_tells_where_one_document_ends() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "null", '"text"', '{"Text": "x"}', '{"text": 5}', '{"text": null}', '{"text": ["x"]}',
     '{"text": "\\ud800"}', "[" * 100_000],
)  # fmt: skip
def test_a_line_without_a_text_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(
        DraftError, match=r"Line 3 of the calibration text .*own\.jsonl is no JSON"
    ) as refusal:
        read_calibration(file)
    one_sentence(refusal.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    for name, reason in (
        ("absent.txt", "cannot be read .No such file"),
        ("", "cannot be read "),
        ("latin.txt", "is not UTF-8"),
    ):
        with pytest.raises(DraftError, match=f"{reason}.*give another file") as refusal:
            read_calibration(tmp_path / name)
        one_sentence(refusal.value)


def one_sentence(error: Exception) -> None:
    assert "\n" not in str(error) and str(error).endswith(".") and ". " not in str(error)


def text_of(*documents: str) -> CalibrationText:
    return CalibrationText("own.txt", documents, digest_of(documents))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 400),
    st.integers(0, 2**63 - 1),
)  # fmt: skip
@settings(max_examples=150)
def test_sequences_are_whole_documents_in_some_order_cut_evenly(
    lengths: list[int], length: int, num_tokens: int, seed: int
) -> None:
    documents = [chr(ord("a") + i) * n for i, n in enumerate(lengths)]
    available = sum(len(bytes_of(document)) for document in documents)
    if available < LEAST_SEQUENCES * length:
        with pytest.raises(
            DraftError, match=f"has {available} tokens, and at least {8 * length} are"
        ) as refusal:
            cut_sequences(text_of(*documents), bytes_of, num_tokens=num_tokens, length=length, seed=seed)
        one_sentence(refusal.value)
        return
    found = cut_sequences(text_of(*documents), bytes_of, num_tokens=num_tokens, length=length, seed=seed)
    wanted = max(LEAST_SEQUENCES, num_tokens // length)
    assert found.dtype == torch.int64 and found.shape == (min(wanted, available // length), length)
    pieces = "".join("|" if token == 1000 else chr(token) for token in found.flatten().tolist()).split("|")
    assert pieces[0] == "", "a document is whole, with what the tokenizer puts before it"
    remaining = documents.copy()
    for piece in pieces[1:-1]:
        remaining.remove(piece)
    assert any(document.startswith(pieces[-1]) for document in remaining)


def test_the_seed_decides_the_order_alone() -> None:
    text = text_of(*(chr(ord("a") + i) * 40 for i in range(12)))

    def cut(seed: int) -> list[list[int]]:
        return cut_sequences(text, bytes_of, num_tokens=200, length=20, seed=seed).tolist()

    assert cut(3) == cut(3)
    assert len({str(cut(seed)) for seed in range(6)}) == 6


def test_no_more_documents_are_encoded_than_are_needed() -> None:
    encoded: list[str] = []

    def encode(document: str) -> list[int]:
        encoded.append(document)
        return bytes_of(document)

    text = text_of(*(chr(ord("a") + i) * 99 for i in range(20)))
    found = cut_sequences(text, encode, num_tokens=250, length=25, seed=0)
    assert found.shape == (10, 25) and len(encoded) == 3


def test_a_text_of_nothing_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DraftError, match=r"\(empty\.jsonl\) has 0 tokens"):
        cut_sequences(read_calibration(tmp_path / "empty.jsonl"), bytes_of, num_tokens=9, length=1, seed=0)
