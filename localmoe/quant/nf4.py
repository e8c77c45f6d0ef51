"""Quantises a matrix to NF4 with bitsandbytes, which only making such a draft needs. Knows no file format and
computes nothing with the result."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from localmoe.core.draft_config import NF4_BITS, NF4_GROUP_SIZE
from localmoe.core.errors import DraftError, sentence_of
from localmoe.kernels.codes import CodeMatrix
from localmoe.quant.nf4_layout import check_blocks, unpack_codes

_REQUIREMENT = "bitsandbytes>=0.46,<1"  # the extra nf4


def bitsandbytes_functional() -> ModuleType:
    """bitsandbytes.functional; on a machine without CUDA too.

    Raises:
        DraftError: it is not installed, or does not work here.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of faster kernels of its own that are not installed
    try:
        return import_module("bitsandbytes.functional")
    except (ImportError, OSError, RuntimeError) as error:  # also a library that does not fit the driver
        why = (
            "is not installed" if isinstance(error, ModuleNotFoundError) else f"fails ({sentence_of(error)})"
        )
        raise DraftError(
            f"An NF4 draft is made with bitsandbytes, which {why}: run '{sys.executable} -m pip install "
            f'"{_REQUIREMENT}"\', or build the draft with --method gptq or rtn.'
        ) from error
    finally:
        logger.setLevel(level)


def quantize_nf4(weight: Tensor) -> CodeMatrix:
    """bitsandbytes' codes and scales (absmax) of a matrix (N, K), 16-bit or float32: blocks of 64 input
    features, K being a multiple of 64.

    Raises:
        DraftError: there is no bitsandbytes.
        ValueError: a weight is NaN or infinite, or K does not fit.
    """
    assert weight.dim() == 2
    rows, columns = weight.shape
    check_blocks(rows, columns)
    if not bool(torch.isfinite(weight).all()):
        kind = "NaN" if bool(torch.isnan(weight).any()) else "infinite"
        raise ValueError(f"the matrix has a weight that is {kind}")
    packed, state = bitsandbytes_functional().quantize_4bit(
        weight.detach().contiguous(), blocksize=NF4_GROUP_SIZE, compress_statistics=False, quant_type="nf4"
    )
    codes, scales = unpack_codes(packed, (rows, columns)), state.absmax.view(rows, -1)
    return CodeMatrix(codes, scales, columns, NF4_GROUP_SIZE, NF4_BITS, codebook=state.code.to(weight.device))
