"""Quicker forms of what the builder of Triton's interpreter calls most. Change no result."""

from __future__ import annotations

from typing import Any

import numpy as np


def quicken_builder(core: Any, interpreter: Any) -> None:
    """Values are made and checked with fewer calls, and what is the same for every load is made once."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    pointer, numpy_dtype, read = core.pointer_type, interpreter._get_np_dtype, interpreter._interpreter.load
    masks: dict[Any, Any] = {}
    zeros: dict[Any, Any] = {}

    def too_wide(data: Any, dtype: Any) -> bool:
        size: int = data.itemsize
        return size > 1 and type(dtype) is not pointer and size * 8 > dtype.primitive_bitwidth

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if too_wide(data, dtype):
            self.__post_init__()  # says what is wrong

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        return handle(output.astype(numpy_dtype(dtype)) if too_wide(output, dtype) else output, dtype)

    def load(self: Any, ptr: Any, *how: Any) -> Any:
        shape = ptr.data.shape
        if shape not in masks:
            masks[shape] = handle(_kept(np.ones(shape, dtype=bool)), core.int1)
        return self.create_masked_load(ptr, masks[shape], None, *how)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *how: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = numpy_dtype(kind)
        if other is not None:
            return handle(read(ptrs.data, mask.data, other.data, dtype), kind)
        key = ptrs.data.shape, dtype
        if key not in zeros:
            zeros[key] = _kept(np.zeros(*key))
        return handle(read(ptrs.data, mask.data, zeros[key], dtype), kind)

    handle.__init__ = make
    builder.binary_op = binary_op
    builder.create_load, builder.create_masked_load = load, masked_load
    _convert_by_shifts(core, interpreter)


def _kept(data: Any) -> Any:
    data.flags.writeable = False
    return data


def _convert_by_shifts(core: Any, interpreter: Any) -> None:
    """Between bfloat16 and float32, where no number is subnormal: with those the interpreter does more."""
    convert = interpreter._convert_float
    names = core.bfloat16.name, core.float32.name

    def converted(data: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if (kind.name, wanted.name) == names:
            bits = data.view(np.uint16)
            if not ((bits & 0x7FFF) - np.uint16(1) < 0x7F).any():  # a zero is the largest number there
                return bits.astype(np.uint32) << np.uint32(16)
        elif (wanted.name, kind.name) == names and rounding is None:
            bits = data.view(np.uint32)
            if not ((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
                return (bits >> np.uint32(16)).astype(np.uint16)
        return convert(data, kind, wanted, rounding)

    interpreter._convert_float = converted
