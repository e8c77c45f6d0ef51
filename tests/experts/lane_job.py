"""A job of the CPU lane for each form of weights that is named, compiled for the processor that the
environment says, or kept since it was; prints how far they are from float64, and whether the code has
registers of 512 and of 256 bits. In FP8 and NVFP4, whose least codes or scales are decoded apart,
each one is looked at too."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[level]) for level in (0, 1, 2)]

import support.without_collector  # noqa: E402, F401
import torch  # noqa: E402
from test_cpu_lane import TOKENS, TOP_K, Rig  # noqa: E402
from test_cpu_lane_fp8 import check_codes  # noqa: E402
from test_cpu_lane_nvfp4 import check_fours  # noqa: E402

from localmoe.kernels.cpu import bf12_products, coded_products, products  # noqa: E402
from localmoe.kernels.weight_forms import WeightForm  # noqa: E402


def error_of(form: WeightForm) -> float:
    hidden = 96 if form is WeightForm.PLAIN else 192
    made = Rig(hidden, 64, form=form)
    try:
        jobs = [
            (expert, [TOP_K * token + expert for token in range(TOKENS - expert)], 64)
            for expert in range(TOP_K)
        ]
        out = made.lane.compute(1, made.x, jobs).double()
        errors = []
        for expert, pairs, share in jobs:
            for pair in pairs:
                wanted = made.wanted(1, expert, pair // TOP_K, share)
                errors.append(float((out[pair] - wanted).norm() / wanted.norm()))
    finally:
        made.lane.close()
    return max(errors)


def note_of(form: WeightForm) -> Path:
    """Where the registers of the form's code are noted, as numba does not show code that it kept."""
    return Path(os.environ["NUMBA_CACHE_DIR"]) / f"registers-{form.value}.json"


def registers_of(form: WeightForm) -> dict[str, bool]:
    """Which ones the form's loops use."""
    loops = {WeightForm.PLAIN: products.dots, WeightForm.BF12: bf12_products._dots}
    if code := "".join(loops.get(form, coded_products._dots).inspect_asm().values()):
        note_of(form).write_text(json.dumps({name: name in code for name in ("zmm", "ymm")}))
    found: dict[str, bool] = json.loads(note_of(form).read_text())
    return found


def main() -> None:
    forms = [WeightForm(form) for form in sys.argv[1:]]
    if not all(note_of(form).exists() for form in forms):  # also after a run that was cut off
        for index in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbi"):
            index.unlink()
    errors = [error_of(form) for form in forms]
    if WeightForm.FP8 in forms:
        check_codes(torch.bfloat16)
    if WeightForm.NVFP4 in forms:
        check_fours(torch.bfloat16)
    registers = [registers_of(form) for form in forms]
    print(json.dumps({"errors": errors, "registers": registers}))


if __name__ == "__main__":
    main()
