"""GPTQ tensors: bytes worked out by hand, and plain loops over the documented layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_samples import gaussian

from localmoe.kernels.int4 import QuantizedMatrix, dequantize, quantize_rtn, unpack_codes
from localmoe.quant.packing import (
    GPTQ_DTYPES,
    GptqTensors,
    gptq_num_bytes,
    gptq_shapes,
    pack_matrix,
    unpack_matrix,
)

# The code of output column n and input row k is (n + k) % 16. A word holds eight rows, the first in its
# lowest nibble, and lies in the file lowest byte first.
GOLDEN_QWEIGHT = (
    "10325476 21436587 32547698 436587a9 547698ba 6587a9cb 7698badc 87a9cbed"
    "98badcfe a9cbed0f badcfe10 cbed0f21 dcfe1032 ed0f2143 fe103254 0f214365"
)


def golden_matrix() -> QuantizedMatrix:
    codes = [[(n + 2 * byte) % 16 | (n + 2 * byte + 1) % 16 << 4 for byte in range(8)] for n in range(8)]
    scales = [[n + 1.0, -0.5] for n in range(8)]
    return QuantizedMatrix(
        torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float16), 16, group_size=8
    )


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


def loop_dequantize(tensors: GptqTensors, version: int) -> torch.Tensor:
    """W (N, K) nibble by nibble: w = scale * (code - zero point)."""
    in_features, out_features = tensors.g_idx.shape[0], tensors.scales.shape[1]
    weight = torch.empty(out_features, in_features, dtype=torch.float64)
    for k in range(in_features):
        group = int(tensors.g_idx[k])
        for n in range(out_features):
            code = int(tensors.qweight[k // 8, n]) >> 4 * (k % 8) & 15
            zero = (int(tensors.qzeros[group, n // 8]) >> 4 * (n % 8) & 15) + (version == 1)
            weight[n, k] = float(tensors.scales[group, n]) * (code - zero)
    return weight


sides = st.integers(1, 5).map(lambda eighths: 8 * eighths)
versions = st.sampled_from([1, 2])


@given(sides, sides, st.sampled_from([2, 6, 8, 16, 128]), versions, st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_a_naive_loop_reads_what_was_packed(
    out_features: int, in_features: int, group_size: int, version: int, seed: int
) -> None:
    matrix = quantize_rtn(gaussian(out_features, in_features, seed), group_size)
    packed = pack_matrix(matrix, version)
    torch.testing.assert_close(
        loop_dequantize(packed, version), dequantize(matrix, torch.float64), rtol=1e-6, atol=0
    )
    back = unpack_matrix(packed, group_size, version)
    assert torch.equal(back.codes, matrix.codes) and torch.equal(back.scales, matrix.scales)
    assert (back.in_features, back.group_size) == (in_features, group_size)


@given(sides, sides, st.sampled_from([2, 6, 16, 128]))
@settings(deadline=None, max_examples=30)
def test_shapes_and_sizes_are_those_of_the_packed_tensors(
    out_features: int, in_features: int, group_size: int
) -> None:
    packed = pack_matrix(quantize_rtn(gaussian(out_features, in_features), group_size)).named("x")
    shapes = {
        f"x.{name}": shape for name, shape in gptq_shapes(out_features, in_features, group_size).items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == shapes
    assert {name: tensor.dtype for name, tensor in packed.items()} == {
        f"x.{name}": dtype for name, dtype in GPTQ_DTYPES.items()
    }
    assert sum(tensor.nbytes for tensor in packed.values()) == gptq_num_bytes(
        out_features, in_features, group_size
    )


def test_a_last_group_that_is_not_full_keeps_the_true_number_of_rows() -> None:
    matrix = quantize_rtn(gaussian(8, 2880), 128)  # 22.5 groups
    packed = pack_matrix(matrix)
    assert packed.qweight.shape == (360, 8) and packed.scales.shape == (23, 8)
    assert packed.g_idx.shape == (2880,) and packed.g_idx[-1] == 22
    back = unpack_matrix(packed, 128)
    assert back.padded_features == 2944 and torch.equal(back.codes, matrix.codes)
    assert (unpack_codes(back.codes)[:, 2880:] == 8).all()


def test_packed_and_unpacked_tensors_share_no_memory_with_their_source() -> None:
    matrix = quantize_rtn(gaussian(8, 8), 8)  # one group: a transpose could be a view
    packed = pack_matrix(matrix)
    back = unpack_matrix(packed, 8)
    pointers = {tensor.data_ptr() for tensor in (matrix.scales, packed.scales, back.scales)}
    pointers |= {tensor.data_ptr() for tensor in (matrix.codes, packed.qweight, back.codes)}
    assert len(pointers) == 6


@pytest.mark.parametrize(("rows", "columns"), [(12, 16), (16, 12)])
def test_sides_that_are_no_multiple_of_8_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} x {columns}"):
        pack_matrix(quantize_rtn(gaussian(rows, columns), 4))


def test_what_the_draft_cannot_compute_with_is_refused() -> None:
    packed = pack_matrix(golden_matrix())
    with pytest.raises(ValueError, match="symmetric"):
        unpack_matrix(packed, 8, version=2)
    shuffled = GptqTensors(packed.qweight, packed.qzeros, packed.scales, packed.g_idx.flip(0))
    with pytest.raises(ValueError, match="grouped in order"):
        unpack_matrix(shuffled, 8)
    infinite = GptqTensors(packed.qweight, packed.qzeros, packed.scales * 1e9, packed.g_idx)
    with pytest.raises(ValueError, match="finite"):
        unpack_matrix(infinite, 8)
