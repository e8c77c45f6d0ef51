"""exp of a row of float32 numbers in vectors, which numba leaves to one call a number.

The range is halved by 2^n, and a polynomial of degree 7 does the rest (the coefficients of Moshier's Cephes
library, expf): within 2 units in the last place, and exactly 0 below -87.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localmoe.kernels.cpu.processor import LANES
from localmoe.kernels.cpu.vector_loops import (
    I32,
    VECTOR,
    const,
    load_at,
    loop,
    multiply_add,
    spread,
    total,
    zeros,
)

_LEAST = -87.0  # smaller results would be subnormal
_PER_LN2 = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the first has nine bits: its products are exact
_FACTORS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
_ROUNDER = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to a whole number, in its lowest bits


def _all(number: float) -> Any:
    return ir.Constant(VECTOR, [number] * LANES)


def exponential(builder: Any, x: Any) -> Any:
    """Of a vector of numbers up to 0; NaN stays what it is."""
    tiny = builder.fcmp_ordered("<", x, _all(_LEAST))
    x = builder.select(tiny, _all(_LEAST), x)
    rounded = builder.fadd(builder.fmul(x, _all(_PER_LN2)), _all(_ROUNDER))
    n = builder.fsub(rounded, _all(_ROUNDER))
    rest = multiply_add(builder, n, _all(-_LN2_HIGH), x)
    rest = multiply_add(builder, n, _all(-_LN2_LOW), rest)
    found = _all(_FACTORS[0])
    for factor in _FACTORS[1:]:
        found = multiply_add(builder, found, rest, _all(factor))
    found = multiply_add(builder, builder.fmul(rest, rest), found, builder.fadd(rest, _all(1.0)))
    wide = ir.VectorType(I32, LANES)
    power = builder.add(builder.bitcast(rounded, wide), ir.Constant(wide, [127] * LANES))
    power = builder.bitcast(builder.shl(power, ir.Constant(wide, [23] * LANES)), VECTOR)
    return builder.select(tiny, _all(0.0), builder.fmul(found, power))


@intrinsic
def exponentials(context: Any, at: Any, count: Any, top: Any) -> Any:
    """x[i] = exp(x[i] - top) for the `count` float32 at an address, a multiple of 16 none of which is above
    `top`; their sum, in an order of its own."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        at, count, top = arguments
        tops = spread(builder, top)

        def turn(k: Any, sums: list[Any]) -> list[Any]:
            place = builder.add(at, builder.shl(k, const(2)))
            found = exponential(builder, builder.fsub(load_at(builder, place, VECTOR, 4), tops))
            builder.store(found, builder.inttoptr(place, VECTOR.as_pointer())).align = 4
            return [builder.fadd(sums[0], found)]

        return total(builder, loop(builder, const(0), count, LANES, zeros(1), turn)[0])

    return types.float32(types.int64, types.int64, types.float32), generate
