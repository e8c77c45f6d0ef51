"""The pieces of a record that belong to its first columns are these columns' weights, and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from localmoe.experts.records import PackedMatrix, RecordLayout
from localmoe.experts.rest_block import rest_pieces
from localmoe.kernels.fp8_tiles import Fp8Matrix
from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.kernels.rests import WORD_BYTES, RestPiece
from localmoe.kernels.weight_forms import WeightForm


def covered(pieces: list[RestPiece], columns: int, num_words: int) -> NDArray[np.int64]:
    """How often each word of a record is in a piece, by the definition."""
    found = np.zeros(num_words, dtype=np.int64)
    for piece in pieces:
        groups = -(-columns // piece.group)
        rows = piece.rows or groups
        width = piece.width * (groups if piece.rows else 1)
        assert rows * width == piece.num_words(columns)
        for row in range(rows):
            at = piece.first + row * piece.pitch
            assert at + width <= num_words
            found[at : at + width] += 1
    return found


@given(
    st.integers(1, 6), st.integers(1, 6), st.booleans(),
    st.sampled_from(["halves", "interleaved", "ungated"]),
    st.integers(0, 99),
)  # fmt: skip
def test_pieces_of_16_bit_records(hidden: int, inner: int, transposed: bool, rows: str, chance: int) -> None:
    hidden, inner, quantum = 8 * hidden, 16 * inner, 16
    columns = quantum * (chance % (inner // quantum) + 1)
    gated, interleaved = rows != "ungated", rows == "interleaved"
    shapes = ((1 + gated) * inner, hidden), (hidden, inner)
    if transposed:
        shapes = shapes[0][::-1], shapes[1][::-1]
    layout = RecordLayout(*shapes, transposed)
    record = torch.zeros(layout.elements, dtype=torch.bfloat16)
    gate_up, down = (view.T if transposed else view for view in layout.views(record))
    halves = (gate_up[::2], gate_up[1::2]) if interleaved else gate_up.split(inner)
    for part in (*halves, down.T):
        part[:columns] = 1
    pieces = rest_pieces(layout, interleaved, quantum, torch.bfloat16)
    assert pieces and all(piece.fits for piece in pieces)
    found = covered(pieces, columns, layout.elements // 2)
    assert (np.repeat(found, 2) == record.float().numpy()).all()
    assert sum(piece.num_words(columns) for piece in pieces) == columns * (2 + gated) * hidden // 2


@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_pieces_of_records_in_mxfp4(hidden: int, inner: int, interleaved: bool, chance: int) -> None:
    hidden, inner = 64 * hidden, 64 * inner
    quantum = 128 if inner % 128 == 0 else 64
    columns = quantum * (chance % (inner // quantum) + 1)
    layout = RecordLayout((hidden, 2 * inner), (inner, hidden), transposed=True, form=WeightForm.MXFP4)
    record = torch.zeros(layout.mxfp4_bytes, dtype=torch.uint8)
    gate_up, down = layout.mxfp4_views(record)
    strips = columns // 16
    for part in (gate_up.codes, gate_up.scales):
        if interleaved:
            part[: 2 * strips] = 1
        else:
            part[:strips] = part[inner // 16 : inner // 16 + strips] = 1
    down.codes[:, : columns // 64], down.scales[:, : -(-columns // 128)] = 1, 1
    pieces = rest_pieces(layout, interleaved, quantum, torch.bfloat16)
    assert pieces and all(piece.fits for piece in pieces)
    found = covered(pieces, columns, layout.mxfp4_bytes // WORD_BYTES)
    assert (np.repeat(found, WORD_BYTES) == record.numpy()).all()
    for piece in pieces:
        if piece.counted:
            assert piece.num_words(columns) == columns // quantum * piece.num_words(quantum)


@given(st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_pieces_of_records_in_bf12(hidden: int, inner: int, gated: bool, chance: int) -> None:
    hidden, inner, quantum = 64 * hidden, 64 * inner, 64
    columns = quantum * (chance % (inner // quantum) + 1)
    shapes = ((1 + gated) * inner, hidden), (hidden, inner)
    layout = RecordLayout(*shapes, transposed=False, form=WeightForm.BF12)
    record = torch.zeros(layout.bf12_bytes, dtype=torch.uint8)
    *gate_up, down = layout.bf12_views(record)
    strips = columns // 16
    for matrix in gate_up:
        for part in matrix.by_strip:
            part[:strips].view(torch.uint8).fill_(1)
    down.codes[:, : columns // 64] = 1
    pieces = rest_pieces(layout, False, quantum, torch.bfloat16)
    assert pieces and all(piece.fits and piece.counted for piece in pieces)
    found = covered(pieces, columns, layout.bf12_bytes // WORD_BYTES)
    assert (np.repeat(found, WORD_BYTES) == record.numpy()).all()
    for piece in pieces:
        assert piece.num_words(columns) == columns // quantum * piece.num_words(quantum)


CODED = WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32


def sides(matrix: PackedMatrix, *, of_rows: bool) -> list[tuple[Tensor, int]]:
    """What lies beside the codes, first by strips, then by so many columns. of_rows: also what is a row's."""
    if isinstance(matrix, Int4Matrix):
        return [(matrix.words, matrix.span)]
    assert isinstance(matrix, Fp8Matrix | Nvfp4Matrix)
    if isinstance(matrix, Fp8Matrix):
        return [(matrix.scales, 128)]
    return [(matrix.scales, 64), *([(matrix.factors, 0)] if of_rows else [])]


@given(
    st.sampled_from(CODED), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_pieces_of_records_in_codes(
    form: WeightForm, hidden: int, inner: int, gated: bool, chance: int
) -> None:
    hidden, inner = 64 * hidden, 64 * inner
    quantum = 128 if inner % 128 == 0 else 64
    columns = quantum * (chance % (inner // quantum) + 1)
    shapes = ((1 + gated) * inner, hidden), (hidden, inner)
    layout = RecordLayout(*shapes, transposed=False, form=form)
    record = torch.zeros(layout.coded_bytes, dtype=torch.uint8)
    *gate_up, down = layout.packed_views(record)
    for matrix in gate_up:
        for part, _ in ((matrix.codes, 0), *sides(matrix, of_rows=True)):
            part[: columns // 16].view(torch.uint8).fill_(1)
    for part, width in ((down.codes, 64), *sides(down, of_rows=False)):
        part[:, : -(-columns // width)].view(torch.uint8).fill_(1)
    pieces = rest_pieces(layout, False, quantum, torch.bfloat16)
    assert pieces and all(piece.fits for piece in pieces)
    found = covered(pieces, columns, layout.coded_bytes // WORD_BYTES)
    assert (np.repeat(found, WORD_BYTES) == record.numpy()).all()
    for piece in pieces:
        if piece.counted:
            assert piece.num_words(columns) == columns // quantum * piece.num_words(quantum)
