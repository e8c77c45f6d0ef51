"""The tensors that bitsandbytes serialises a 4-bit matrix to: packs and unpacks them. Reads no file and
chooses no codes (nf4 does).

Of a module: `weight` uint8 (N K / 2, 1), two codes a byte, the first in the high half; `weight.absmax`
float32 (N K / 64), a scale a block; `weight.quant_map` float32 (16), the values of the codes; and
`weight.quant_state.bitsandbytes__nf4`, JSON as bytes. A block is 64 weights in a row in memory, so with
outputs x inputs (N, K), K a multiple of 64, it is a group of inputs of one output, which is what kernels
need. Experts that their model keeps the other way round (gpt_oss) are turned before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localmoe.core.draft_config import NF4_BITS, NF4_GROUP_SIZE
from localmoe.core.errors import DraftError
from localmoe.kernels.codebook import nf4_codebook
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.matrix_layout import Part

METHOD = "bitsandbytes"  # in quantization configs
_STATE = "weight.quant_state.bitsandbytes__nf4"
_NOT_QUANTISED = ["lm_head", "self_attn", "shared_expert", "mlp.gate", "mlp.router", "block_sparse_moe.gate"]


@dataclass(frozen=True, slots=True)
class Nf4Layout:
    """NF4 in blocks of 64 with float32 scales. See MatrixLayout.

    Attributes:
        dtype: torch's name for that of the 16-bit weights, which bitsandbytes gives back.
    """

    dtype: str = "bfloat16"

    @property
    def bits(self) -> int:
        """4."""
        return NF4_BITS

    @property
    def group_size(self) -> int:
        """64."""
        return NF4_GROUP_SIZE

    @property
    def stored_group_size(self) -> int:
        """64."""
        return NF4_GROUP_SIZE

    @property
    def act_order(self) -> bool:
        """Columns are in order."""
        return False

    @property
    def codebook(self) -> bool:
        """Codes are NF4's values."""
        return True

    @property
    def code_part(self) -> str:
        """The module's weight."""
        return "weight"

    def config(self) -> dict[str, Any]:
        """As transformers writes a BitsAndBytesConfig."""
        return {
            "quant_method": METHOD,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": self.dtype,
            "llm_int8_skip_modules": _NOT_QUANTISED,
        }

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes, scales, table and description."""
        weights = out_features * in_features
        return {
            "weight": (torch.uint8, (weights // 2, 1)),
            "weight.absmax": (torch.float32, (weights // NF4_GROUP_SIZE,)),
            "weight.quant_map": (torch.float32, (16,)),
            _STATE: (torch.uint8, (-1,)),
        }

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Raises ValueError: K is no multiple of 64."""
        check_blocks(out_features, in_features)
        weights = out_features * in_features
        state = self._state(out_features, in_features)
        return weights // 2 + 4 * (weights // NF4_GROUP_SIZE) + 64 + len(state)

    def pack(self, matrix: CodeMatrix) -> dict[str, Tensor]:
        """In storage of their own."""
        assert matrix.codebook is not None and matrix.group_size == NF4_GROUP_SIZE and matrix.columns is None
        check_blocks(matrix.out_features, matrix.in_features)
        pairs = matrix.codes.view(-1, 2)
        state = bytearray(self._state(matrix.out_features, matrix.in_features))
        return {
            "weight": (pairs[:, :1] << 4) | pairs[:, 1:],
            "weight.absmax": matrix.scales.flatten().clone(),
            "weight.quant_map": matrix.codebook.clone(),
            _STATE: torch.frombuffer(state, dtype=torch.uint8),
        }

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> CodeMatrix:
        """Raises ValueError: it is no NF4 in blocks of 64, or a scale is not finite."""
        check_blocks(*shape)
        _check_state(parts[_STATE], shape)
        codebook, absmax = parts["weight.quant_map"], parts["weight.absmax"]
        if not torch.equal(codebook, nf4_codebook()):
            raise ValueError("its table of values is not NF4's")
        if not bool(torch.isfinite(absmax).all()):
            raise ValueError("a scale is not finite")
        return CodeMatrix(
            unpack_codes(parts["weight"], shape),
            absmax.view(shape[0], -1),
            shape[1],
            NF4_GROUP_SIZE,
            NF4_BITS,
            codebook=codebook,
        )

    def _state(self, out_features: int, in_features: int) -> bytes:
        values = {
            "quant_type": "nf4",
            "blocksize": NF4_GROUP_SIZE,
            "dtype": self.dtype,
            "shape": [out_features, in_features],
        }
        return json.dumps(values).encode()


def check_blocks(out_features: int, in_features: int) -> None:
    """Raises ValueError: K is no multiple of 64, so a block would hold weights of two outputs."""
    if in_features % NF4_GROUP_SIZE:
        raise ValueError(
            f"a {out_features} x {in_features} matrix does not fit NF4, whose blocks are {NF4_GROUP_SIZE} "
            "input features"
        )


def unpack_codes(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """uint8 (N, K) codes of bytes with two each."""
    pairs = packed.view(-1, 1)
    return torch.cat((pairs >> 4, pairs & 15), dim=1).view(shape)


def read_nf4_layout(folder: Path, values: Mapping[str, Any]) -> Nf4Layout:
    """What a bitsandbytes `quantization_config` says.

    Raises:
        DraftError: the weights are not NF4, or their scales are quantised too.
    """
    kind = values.get("bnb_4bit_quant_type") if values.get("load_in_4bit") is True else "8 bits"
    if kind != "nf4" or values.get("bnb_4bit_use_double_quant") is True:
        what = "doubly quantised NF4" if kind == "nf4" else kind
        raise DraftError(
            f"The draft in {folder} is in bitsandbytes' {what}, and this version reads NF4 whose scales are "
            "not quantised: build one with 'localmoe draft MODEL'."
        )
    return Nf4Layout(str(values.get("bnb_4bit_compute_dtype", "bfloat16")))


def _check_state(state: Tensor, shape: tuple[int, int]) -> None:
    """Raises ValueError: the description is damaged, or of another kind of matrix."""
    try:
        found = json.loads(bytes(state.tolist()))
        described = found["quant_type"], found["blocksize"], found["shape"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("its description (quant_state) cannot be read") from None
    if described != ("nf4", NF4_GROUP_SIZE, list(shape)):
        raise ValueError(
            f"it is {described[0]} in blocks of {described[1]} of shape {described[2]} and should be nf4 in "
            f"blocks of {NF4_GROUP_SIZE} of shape {list(shape)}"
        )
