"""GPTQ tensors: bytes worked out by hand, files of public packers, and plain loops over the documented
layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_samples import gaussian
from safetensors.torch import load_file
from torch import Tensor

from localmoe.kernels.codes import BITS, CodeMatrix, dequantize, quantize_rtn
from localmoe.quant.packing import (
    GPTQ_DTYPES,
    GptqTensors,
    GptqVersion,
    gptq_num_bytes,
    gptq_shapes,
    pack_matrix,
    unpack_matrix,
)
from localmoe.quant.words import codes_multiple, pack_codes, unpack_codes

PUBLIC = Path(__file__).resolve().parents[1] / "data" / "gptq"  # how they were made: make_golden.py there

# The code of output column n and input row k is (n + k) % 16. A word holds eight rows, the first in its
# lowest nibble, and lies in the file lowest byte first.
GOLDEN_QWEIGHT = (
    "10325476 21436587 32547698 436587a9 547698ba 6587a9cb 7698badc 87a9cbed"
    "98badcfe a9cbed0f badcfe10 cbed0f21 dcfe1032 ed0f2143 fe103254 0f214365"
)


def golden_matrix() -> CodeMatrix:
    codes = [[(n + k) % 16 for k in range(16)] for n in range(8)]
    scales = [[n + 1.0, -0.5] for n in range(8)]
    return CodeMatrix(torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales).half(), 16, 8, bits=4)


def test_packed_bytes_are_those_worked_out_by_hand() -> None:
    packed = pack_matrix(golden_matrix())
    assert packed.qweight.numpy().tobytes().hex() == GOLDEN_QWEIGHT.replace(" ", "")
    assert packed.qzeros.numpy().tobytes().hex() == "77777777" * 2
    # float16 1..8, then eight times -0.5
    assert packed.scales.numpy().tobytes().hex() == "003c 0040 0042 0044 0045 0046 0047 0048".replace(
        " ", ""
    ) + ("00b8" * 8)
    assert packed.g_idx.tolist() == [0] * 8 + [1] * 8
    assert pack_matrix(golden_matrix(), version=2).qzeros.numpy().tobytes().hex() == "88888888" * 2


def from_public_packers(bits: int, order: str, version: GptqVersion) -> tuple[GptqTensors, dict[str, Tensor]]:
    """The packers' tensors, in groups of 64 of 96 input features, and what they were given."""
    file = load_file(PUBLIC / f"int{bits}.safetensors")
    packed = GptqTensors(file["qweight"], file[f"qzeros_v{version}"], file["scales"], file[order])
    return packed, file


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", ["in_order", "act_order"])
@pytest.mark.parametrize("bits", BITS)
def test_files_of_public_packers_are_read_and_written_byte_for_byte(
    bits: int, order: str, version: GptqVersion
) -> None:
    packed, given = from_public_packers(bits, order, version)
    matrix = unpack_matrix(packed, 64, version, bits)
    group_of = given[order].long()
    weight = given["scale"].double()[:, group_of] * (given["codes"].double() - 2 ** (bits - 1))
    assert torch.equal(dequantize(matrix, torch.float64), weight)
    assert (matrix.columns is None) == (order == "in_order")
    if matrix.columns is not None:  # groups in turn, and the rows of each in their own order
        keys = group_of[matrix.columns] * 96 + matrix.columns
        assert torch.equal(keys, keys.sort().values)
    again = pack_matrix(matrix, version)
    for name, dtype in GPTQ_DTYPES.items():
        assert getattr(again, name).dtype == dtype
        assert getattr(again, name).numpy().tobytes() == getattr(packed, name).numpy().tobytes(), name


@given(st.sampled_from(BITS), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=40)
def test_words_are_one_stream_of_bits(bits: int, rows: int, multiples: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = multiples * codes_multiple(bits)
    codes = torch.randint(0, 1 << bits, (rows, count), generator=generator, dtype=torch.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (rows, count * bits // 32)
    for row in range(rows):
        stream = int.from_bytes(words[row].numpy().tobytes(), "little")
        assert [stream >> bits * j & (1 << bits) - 1 for j in range(count)] == codes[row].tolist()
    assert torch.equal(unpack_codes(words, bits), codes)


def field(words: list[int], bits: int, index: int) -> int:
    """Field `index` of a stream of 32-bit words, bit by bit."""
    found = 0
    for bit in range(bits):
        word, shift = divmod(bits * index + bit, 32)
        found |= (words[word] >> shift & 1) << bit
    return found


def loop_dequantize(tensors: GptqTensors, version: int, bits: int) -> Tensor:
    """W (N, K) code by code: w = scale * (code - zero point)."""
    in_features, out_features = tensors.g_idx.shape[0], tensors.scales.shape[1]
    weight = torch.empty(out_features, in_features, dtype=torch.float64)
    for n in range(out_features):
        column = tensors.qweight[:, n].tolist()
        for k in range(in_features):
            group = int(tensors.g_idx[k])
            zero = field(tensors.qzeros[group].tolist(), bits, n) + (version == 1)
            weight[n, k] = float(tensors.scales[group, n]) * (field(column, bits, k) - zero)
    return weight


def shuffled(matrix: CodeMatrix, seed: int) -> CodeMatrix:
    """The same codes for input features in another order, ascending within each group, as a file keeps
    them."""
    columns = torch.randperm(matrix.in_features, generator=torch.Generator().manual_seed(seed))
    pieces = columns.split(matrix.group_size)
    return replace(matrix, columns=torch.cat([piece.sort().values for piece in pieces]))


versions = st.sampled_from([1, 2])
groups = st.sampled_from([2, 6, 8, 16, 128])


@given(
    st.sampled_from(BITS), st.integers(1, 2), st.integers(1, 3), groups, versions, st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=30)
def test_a_naive_loop_reads_what_was_packed(
    bits: int, rows: int, columns: int, group_size: int, version: GptqVersion, act_order: bool, seed: int
) -> None:
    sides = rows * codes_multiple(bits), columns * codes_multiple(bits)
    matrix = quantize_rtn(gaussian(*sides, seed), bits, group_size)
    matrix = shuffled(matrix, seed) if act_order else matrix
    packed = pack_matrix(matrix, version)
    expected = loop_dequantize(packed, version, bits)
    torch.testing.assert_close(dequantize(matrix, torch.float64), expected, rtol=1e-6, atol=0)
    back = unpack_matrix(packed, group_size, version, bits)
    torch.testing.assert_close(dequantize(back, torch.float64), expected, rtol=1e-6, atol=0)
    if back.columns is not None or not act_order:
        assert torch.equal(back.codes, matrix.codes) and torch.equal(back.scales, matrix.scales)
        assert act_order == (back.columns is not None)
        assert back.columns is None or torch.equal(back.columns, matrix.columns)
    assert (back.in_features, back.group_size, back.bits) == (sides[1], group_size, bits)


@given(st.sampled_from(BITS), st.integers(1, 3), st.integers(1, 5), groups)
@settings(max_examples=30)
def test_shapes_and_sizes_are_those_of_the_packed_tensors(
    bits: int, rows: int, columns: int, group_size: int
) -> None:
    sides = rows * codes_multiple(bits), columns * codes_multiple(bits)
    packed = pack_matrix(quantize_rtn(gaussian(*sides), bits, group_size)).named("x")
    shapes = {f"x.{name}": shape for name, shape in gptq_shapes(*sides, group_size, bits).items()}
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == shapes
    assert {name: tensor.dtype for name, tensor in packed.items()} == {
        f"x.{name}": dtype for name, dtype in GPTQ_DTYPES.items()
    }
    assert sum(tensor.nbytes for tensor in packed.values()) == gptq_num_bytes(*sides, group_size, bits)


def test_a_last_group_that_is_not_full_keeps_the_true_number_of_rows() -> None:
    matrix = quantize_rtn(gaussian(8, 2880), 4, 128)  # 22.5 groups
    packed = pack_matrix(matrix)
    assert packed.qweight.shape == (360, 8) and packed.scales.shape == (23, 8)
    assert packed.g_idx.shape == (2880,) and packed.g_idx[-1] == 22
    back = unpack_matrix(packed, 128)
    assert back.padded_features == 2944 and torch.equal(back.codes, matrix.codes)
    assert (back.codes[:, 2880:] == 8).all()


def test_packed_and_unpacked_tensors_share_no_memory_with_their_source() -> None:
    matrix = quantize_rtn(gaussian(4, 4), 8, 4)  # one group and whole bytes: views would do
    packed = pack_matrix(matrix)
    back = unpack_matrix(packed, 4, bits=8)
    pointers = {tensor.data_ptr() for tensor in (matrix.scales, packed.scales, back.scales)}
    pointers |= {tensor.data_ptr() for tensor in (matrix.codes, packed.qweight, back.codes)}
    assert len(pointers) == 6


@pytest.mark.parametrize(
    ("bits", "rows", "columns"), [(4, 12, 16), (4, 16, 12), (3, 32, 48), (2, 24, 16), (8, 4, 6)]
)
def test_sides_that_do_not_fill_words_are_refused(bits: int, rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} x {columns} .* multiples of .* with {bits} bits"):
        pack_matrix(quantize_rtn(gaussian(rows, columns), bits, 2))


def test_what_the_draft_cannot_compute_with_is_refused() -> None:
    packed = pack_matrix(golden_matrix())
    with pytest.raises(ValueError, match=r"symmetric \(a zero point is 7 and should be 8\)"):
        unpack_matrix(packed, 8, version=2)
    one_wrong = packed.qzeros.clone()
    one_wrong[1, 0] = 0x77727777
    with pytest.raises(ValueError, match="a zero point is 3 and should be 8"):
        unpack_matrix(replace(packed, qzeros=one_wrong), 8)
    with pytest.raises(ValueError, match="finite"):
        unpack_matrix(replace(packed, scales=packed.scales * 1e9), 8)


@pytest.mark.parametrize(
    ("g_idx", "sentence"),
    [
        ([0] * 9 + [1] * 7, r"group 0 \(g_idx\) has 9 rows and should have 8"),
        ([1] * 9 + [0] * 7, r"group 0 \(g_idx\) has 7 rows and should have 8"),
        ([0] * 8 + [2] * 8, r"group 1 \(g_idx\) has 0 rows and should have 8"),
        ([-1] + [0] * 7 + [1] * 8, r"group -1 \(g_idx\) has 1 rows and should have 0"),
    ],
)
def test_groups_of_another_length_are_refused(g_idx: list[int], sentence: str) -> None:
    packed = replace(pack_matrix(golden_matrix()), g_idx=torch.tensor(g_idx, dtype=torch.int32))
    with pytest.raises(ValueError, match=sentence):
        unpack_matrix(packed, 8)
