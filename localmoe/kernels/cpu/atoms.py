"""What compiled CPU code needs and numba does not offer: 16-bit floats, ordered access to memory that others
write, a clock. Operations on one word each; computes nothing.

Addresses are int64. Every operation is a few machine instructions, for x86-64 and AArch64.
"""

from __future__ import annotations

import sys
from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# a function that only compiled code calls: without what Python would call it by
compiled = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
# one that only one other calls, and is compiled as a part of it: what it calls is optimised once less
part = njit(inline="always")
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
IS_X86 = machine().lower() in ("x86_64", "amd64")
IS_ARM = machine().lower() in ("aarch64", "arm64")


def as_float(builder: Any, word: Any, is_bfloat: bool) -> Any:
    """Code for the float32 of a 16-bit float."""
    if is_bfloat:
        wide = builder.shl(builder.zext(word, _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, ir.FloatType())
    return builder.fpext(builder.bitcast(word, ir.HalfType()), ir.FloatType())


@intrinsic
def value(context: Any, word: Any) -> Any:
    """float32 of a 16-bit float: a uint16 holds a bfloat16, an int16 an IEEE half. Of a float32 itself."""
    if word == types.float32:
        return types.float32(word), lambda _, __, ___, arguments: arguments[0]
    is_bfloat = word == types.uint16
    return types.float32(word), lambda _, builder, __, words: as_float(builder, words[0], is_bfloat)


@intrinsic
def held(context: Any, word: Any, like: Any) -> Any:
    """A number as the array `like` holds it: the word or float32 itself, or float32 of a word."""
    if like.dtype == word:
        return word(word, like), lambda _, __, ___, arguments: arguments[0]
    is_bfloat = word == types.uint16
    return types.float32(word, like), lambda _, builder, __, words: as_float(builder, words[0], is_bfloat)


@intrinsic
def kept(context: Any, number: Any, word: Any, like: Any) -> Any:
    """The nearest number of `word`'s kind (see `value`; ties to even) to a float32, as the array `like` holds
    it: a float32, or of bfloat16 the word. The number itself where that kind is float32."""
    if word == types.float32:
        return types.float32(types.float32, word, like), lambda _, __, ___, arguments: arguments[0]
    as_word = like.dtype == types.uint16

    def to_bfloat16(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        near = builder.add(builder.add(bits, ir.Constant(_I32, 0x7FFF)), odd)
        near = builder.and_(near, ir.Constant(_I32, 0xFFFF0000))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        near = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), near)
        if as_word:
            return builder.trunc(builder.lshr(near, ir.Constant(_I32, 16)), ir.IntType(16))
        return builder.bitcast(near, ir.FloatType())

    def to_half(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fpext(builder.fptrunc(arguments[0], ir.HalfType()), ir.FloatType())

    result = types.uint16 if as_word else types.float32
    return result(types.float32, word, like), to_bfloat16 if word == types.uint16 else to_half


@intrinsic
def words_at(context: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers of the kind that the array `like` holds, or that the word `like` is, for
    numba.carray."""
    kind = like.dtype if isinstance(like, types.Array) else like

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held = ir.FloatType() if kind == types.float32 else ir.IntType(kind.bitwidth)
        return builder.inttoptr(arguments[0], held.as_pointer())

    return types.CPointer(kind)(types.int64, like), generate


@intrinsic
def load(context: Any, address: Any) -> Any:
    """The int64 at an address; what its writer stored before it is visible afterwards (acquire)."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """Write an int64; whoever sees it sees all that was stored before (release)."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return ir.Constant(ir.IntType(8), 0)

    return types.int8(types.int64, types.int64), generate


@intrinsic
def add(context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, in one piece; what was there before."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap_if(context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put `value` where `expected` is, in one piece; whether it was."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        done = builder.cmpxchg(pointer, arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(done, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


def prefetch(builder: Any, address: Any, *, near: bool = True) -> None:
    """Code that asks for the line of memory at an address, which need not be one that may be read. near: into
    the first cache, instead of the second one alone."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind)
    read, level, data = (ir.Constant(_I32, number) for number in (0, 3 if near else 2, 1))
    builder.call(function, [builder.inttoptr(address, ir.IntType(8).as_pointer()), read, level, data])


@intrinsic
def fetch(context: Any, address: Any) -> Any:
    """Ask for the line of memory at an address."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return ir.Constant(ir.IntType(8), 0)

    return types.int8(types.int64), generate


@intrinsic
def pause(context: Any) -> Any:
    """A moment's rest inside a loop that waits."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        if IS_X86:
            call_llvm(builder, ir.VoidType(), "llvm.x86.sse2.pause")
        elif IS_ARM:
            call_llvm(builder, ir.VoidType(), "llvm.aarch64.hint", ir.Constant(_I32, 1))  # yield
        return ir.Constant(ir.IntType(8), 0)

    return types.int8(), generate


@intrinsic
def ticks(context: Any) -> Any:
    """A counter that all cores share and that runs at one rate."""

    def generate(_: Any, builder: Any, __: Any, ___: Any) -> Any:
        # of a core's cycles on x86, where it is constant; on AArch64 programs may not read that one
        name = "llvm.readsteadycounter" if IS_ARM else "llvm.readcyclecounter"
        return call_llvm(builder, _I64, name)

    return types.int64(), generate


def call_llvm(builder: Any, result: Any, name: str, *arguments: Any) -> Any:
    """Call one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


# POSIX alone: a Windows thread that sleeps is back after a millisecond at best
CAN_NAP = sys.platform != "win32"
nap: Any = types.ExternalFunction("usleep", types.int32(types.uint32)) if CAN_NAP else None


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first element lies."""
    return int(array.ctypes.data)
