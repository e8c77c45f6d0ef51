"""A job of the CPU lane for each form of weights that is named, compiled for the processor that the
environment says; prints how far they are from float64, and whether the code has registers of 512 and of 256
bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (0, 1, 2)]

import support.without_collector  # noqa: E402, F401
from test_cpu_lane import Rig  # noqa: E402

from localmoe.kernels.cpu import bf12_products, products  # noqa: E402
from localmoe.kernels.cpu.mxfp4_products import _dots  # noqa: E402
from localmoe.kernels.weight_forms import WeightForm  # noqa: E402


def error_of(form: WeightForm) -> float:
    hidden = 96 if form is WeightForm.PLAIN else 192
    made = Rig(hidden, 64, form=form)
    try:
        jobs = [(expert, [3 * expert, 3 * expert + 1, 3 * expert + 2], 64) for expert in range(4)]
        out = made.lane.compute(1, made.x, jobs).double()
        errors = []
        for expert, pairs, share in jobs:
            for pair in pairs:
                wanted = made.wanted(1, expert, pair // 3, share)
                errors.append(float((out[pair] - wanted).norm() / wanted.norm()))
    finally:
        made.lane.close()
    return max(errors)


def main() -> None:
    errors = [error_of(WeightForm(form)) for form in sys.argv[1:]]
    loops = products.dots, _dots, bf12_products._dots
    code = "".join(code for made in loops for code in made.inspect_asm().values())
    print(json.dumps({"errors": errors, "zmm": "zmm" in code, "ymm": "ymm" in code}))


if __name__ == "__main__":
    main()
