"""What the processor offers to compiled code: how wide its vectors are, how many it holds, whether it
multiplies bfloat16 itself, in vectors and in whole tiles, how far ahead it wants to be asked for memory.
Computes nothing.

Read from where numba reads it, so that code that is compiled for another processor (NUMBA_CPU_NAME,
NUMBA_CPU_FEATURES) is cut for that one.
"""

from __future__ import annotations

import ctypes
import sys

import llvmlite.binding as llvm
from numba.core import config
from numba.core.codegen import get_host_cpu_features

from localmoe.kernels.cpu.atoms import IS_X86


def _features() -> frozenset[str]:
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        listed = str(config.CPU_FEATURES or "")  # what a name alone implies is not known here
    else:
        listed = get_host_cpu_features()  # less what NUMBA_ENABLE_AVX forbids
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


_FEATURES = _features()
HAS_AVX2 = IS_X86 and "avx2" in _FEATURES
HAS_AVX512 = IS_X86 and "avx512f" in _FEATURES
# look-ups by bytes in whole vectors: in tables of 16, and (vpermi2b) of 128
HAS_BYTE_TABLES = "avx512bw" in _FEATURES if HAS_AVX512 else HAS_AVX2
HAS_LARGE_TABLES = HAS_AVX512 and {"avx512bw", "avx512vbmi"} <= _FEATURES
# vdpbf16ps: exact products of bfloat16 pairs, float32 sums; subnormals count as zero
HAS_BF16_DOTS = HAS_AVX512 and "avx512bf16" in _FEATURES
# Xeons' AMX: products of tiles of 16 rows of bfloat16 pairs. Asked for where it is used: may_use_tiles
HAS_TILES = HAS_BF16_DOTS and {"amx-tile", "amx-bf16"} <= _FEATURES and sys.platform == "linux"
LANES = 16 if HAS_AVX512 else 8 if IS_X86 else 4  # float32 numbers of a vector
MANY_REGISTERS = not IS_X86 or HAS_AVX512  # 32 vectors instead of 16

if HAS_BF16_DOTS:
    llvm.initialize_native_asmparser()  # the instruction is written as assembly: LLVM's name for it changes
# Whether what is fetched ahead goes into the second cache, from further away. A core of an EPYC (Zen 4) reads
# 16-bit weights at 22 GB/s so, else at 16, and MXFP4 at 19, else at 12.7; 14 threads of a Xeon read MXFP4 no
# faster, or more slowly (benchmarks/cpu_experts.py).
FETCHES_FAR = str(config.CPU_NAME or llvm.get_host_cpu_name()).startswith("znver")

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def may_use_tiles() -> bool:
    """Whether this process may use AMX from here on: Linux wants to be asked, as threads' state grows by
    8 KiB, and refuses, say, where a thread's stack for signals has no room for that."""
    if not HAS_TILES:
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0
